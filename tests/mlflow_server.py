"""A real MLflow server on loopback that a test can kill and start again at the same address."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time
import urllib.request


class MlflowServer:
    """A server on the SQLite store `database`; artifacts are served from the folder beside it."""

    def __init__(self, database: Path) -> None:
        self.database = database
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float = 240) -> None:
        """Returns when the server answers."""
        words = ["--backend-store-uri", f"sqlite:///{self.database}", "--port", str(self.port)]
        words += ["--artifacts-destination", str(self.database.parent / "served"), "--workers", "1"]
        log = open(self.database.parent / "server.log", "ab")  # noqa: SIM115 - the process has it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *words],
            env=dict(os.environ) | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(
            f"MLflow did not start: {(self.database.parent / 'server.log').read_text()[-2000:]}"
        )

    def kill(self) -> None:
        """SIGKILL to the server and all its workers."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
