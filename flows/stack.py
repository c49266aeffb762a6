"""`make stack`: the whole remote pipeline on this machine: two servers, a DVC remote, two workers.

    python -m flows.stack [--home .stack] [--prefect-port 4200] [--mlflow-port 5000]

Prefect server and MLflow server (artifacts through the server; SQLite, or MLFLOW_BACKEND_STORE_URI) listen on
loopback; the DVC remote is a folder; the workers `cpu` and `gpu` have homes and clones of their own and take
the code from this repository's commits. Ctrl-C ends all of it; what it has written stays in HOME.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
import urllib.request

from flows.run_stage import SUPERVISE
from stages import environment
from stages.command import command, fail
from stages.params import ROOT

READY_S = 300.0  # a loaded machine takes minutes to import what an idle one has in seconds
END_GRACE_S = 8.0
WORKERS = {"cpu": None, "gpu": 1}  # pool -> flow runs at a time


class StackError(RuntimeError):
    """A part did not start; the message says where its log is."""


@dataclass
class Stack:
    """Running parts by name, and the environment in which clients reach them."""

    home: Path
    repository: str
    prefect_port: int
    mlflow_port: int
    extra: Mapping[str, str] = field(default_factory=dict)
    parts: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a client or worker needs: where the servers, the repository and the data are."""
        return {
            "PREFECT_API_URL": f"http://127.0.0.1:{self.prefect_port}/api",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.mlflow_port}",
            "PARAVT_DVC_REMOTE": str(self.home / "dvc-remote"),
            "PARAVT_GIT": self.repository,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        } | dict(self.extra)

    def start(self) -> None:
        """Servers, then pools and deployments, then workers. Raises StackError."""
        (self.home / "dvc-remote").mkdir(parents=True, exist_ok=True)
        self.start_prefect()
        self.start_mlflow()
        self.wait("prefect", f"http://127.0.0.1:{self.prefect_port}/api/health")
        for pool in WORKERS:
            self.start_worker(pool, pool)
        self.deploy()
        self.wait("mlflow", f"http://127.0.0.1:{self.mlflow_port}/health")
        self.wait_workers()

    def start_prefect(self) -> None:
        words = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.prefect_port)]
        # a page asks the server it came from; by default, port 4200 of this machine
        env = {
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": "",
            "PREFECT_UI_API_URL": "/api",
        }
        self._begin("prefect", words, env)

    def start_mlflow(self) -> None:
        folder = self.home / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        store = os.environ.get("MLFLOW_BACKEND_STORE_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        words = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.mlflow_port)]
        words += ["--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
        self._begin("mlflow", [*words, "--workers", "1"], {})

    def start_worker(self, name: str, pool: str) -> None:
        """A worker with a home, a work folder and clones of its own."""
        home = self.home / "workers" / name
        home.mkdir(parents=True, exist_ok=True)
        limit = ["--limit", str(WORKERS[pool])] if WORKERS[pool] else []
        words = ["prefect", "worker", "start", "--pool", pool, "--name", name, "--type", "process", *limit]
        env = {"PREFECT_HOME": str(home / "prefect"), "PARAVT_WORK": str(home / "work"), "HOME": str(home)}
        self._begin(f"worker-{name}", words, self.environment | env, home)

    def deploy(self) -> None:
        env = self._full(self.environment | {"PREFECT_HOME": str(self.home / "client")})
        done = subprocess.run(
            [sys.executable, "-m", "flows.deploy"], cwd=ROOT, env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise StackError(f"the deployments were refused: {(done.stderr or done.stdout).strip()[-600:]}")

    def wait(self, name: str, url: str) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:
                self._check(name, deadline)
                time.sleep(0.3)

    def wait_workers(self) -> None:
        """Until each worker has started to ask for work."""
        deadline = time.monotonic() + READY_S
        for name in [name for name in self.parts if name.startswith("worker-")]:
            while "started!" not in self.log(name).read_text(errors="replace"):
                self._check(name, deadline)
                time.sleep(0.3)

    def log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def stop(self) -> None:
        """End all parts, workers first, and whatever they started. Returns when nothing is left."""
        for name in sorted(self.parts, key=lambda part: not part.startswith("worker")):
            self.stop_part(name)

    def stop_part(self, name: str) -> None:
        part = self.parts.pop(name)
        if part.stdin:
            part.stdin.close()  # the supervisor ends the tree
        try:
            part.wait(END_GRACE_S + 10)
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()

    def memory_gib(self) -> float:
        """Proportional memory of all parts (shared pages counted once)."""
        import psutil

        total = 0
        for part in self.parts.values():
            root = psutil.Process(part.pid)
            for process in [root, *root.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it ended in between
                    continue
        return total / 2**30

    def _begin(self, name: str, words: list[str], env: Mapping[str, str], cwd: Path = ROOT) -> None:
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.log(name), "wb") as log:
            self.parts[name] = subprocess.Popen(
                [sys.executable, "-S", str(SUPERVISE), str(END_GRACE_S), sys.executable, "-m", *words],
                cwd=cwd,
                env=self._full(env),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _full(self, env: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return dict(os.environ) | {"PATH": path} | dict(env)

    def _check(self, name: str, deadline: float) -> None:
        ended = self.parts[name].poll() is not None
        if ended or time.monotonic() > deadline:
            how = "ended" if ended else f"was not ready in {READY_S:.0f} s"
            raise StackError(f"{name} {how}; see {self.log(name)}")


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    """The stack within the block; all of it is gone after it."""
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, default=Path(".stack"), help="where it is kept (%(default)s)")
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    options = parser.parse_args(arguments)
    environment.apply(ROOT)
    started = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    repository = os.environ.get("PARAVT_GIT") or str(ROOT)
    stack = Stack(options.home.resolve(), repository, options.prefect_port, options.mlflow_port)
    with command("stack"):
        try:
            with running(stack):
                print(_words(stack, time.monotonic() - started), flush=True)
                while all(part.poll() is None for part in stack.parts.values()):
                    time.sleep(1)
                gone = [name for name, part in stack.parts.items() if part.poll() is not None]
                fail("stack", f"{', '.join(gone)} ended; see {stack.home / 'logs'}")
        except KeyboardInterrupt:
            print("stack: stopped", flush=True)
        except StackError as error:
            fail("stack", str(error))
    return 0


def _end(number: int, frame: object) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _words(stack: Stack, seconds: float) -> str:
    env = "\n".join(f"  export {name}={value}" for name, value in stack.environment.items())
    return (
        f"ready in {seconds:.0f} s, {stack.memory_gib():.2f} GiB\n"
        f"runs      http://127.0.0.1:{stack.mlflow_port}\nflows     http://127.0.0.1:{stack.prefect_port}\n"
        f"start     python -m flows.remote scale=smoke      in a shell with\n{env}\nCtrl-C ends all of it"
    )


if __name__ == "__main__":
    sys.exit(main())
