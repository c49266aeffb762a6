"""One stage, run by DVC, under supervision: the one way in which flows run anything.

    dvc --wait-for-lock repro --single-item NAME

DVC decides whether the stage really runs, takes it from the cache or has nothing to do; the caller's cache
never does. The command gets a session of its own, so that a stop reaches DVC and the stage, and the stage
watches the pid in SUPERVISOR_PID, so that it ends when its flow is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

from stages.tracking.lifeline import SUPERVISOR

GRACE_S = 45.0  # a stage that is stopped closes its run, then ends
_running: set[subprocess.Popen] = set()
_guard = threading.Lock()


class StageFailed(RuntimeError):
    """A stage did not end well. `transient` says that a second try may help."""

    def __init__(self, name: str, code: int, output: str) -> None:
        self.name, self.code, self.output = name, code, output
        last = [line for line in output.splitlines() if line.strip()]
        words = next(
            (line for line in reversed(last) if line.startswith(f"{name}:")), last[-1] if last else ""
        )
        super().__init__(f"stage {name} failed (exit {code}): {words.removeprefix(f'{name}: ')}")

    @property
    def transient(self) -> bool:
        """True if the stage was killed from outside or DVC was busy, not if the stage said why it ends."""
        killed = re.search(r"exited with (-9|137)\b", self.output)
        return bool(killed) or "Unable to acquire lock" in self.output or "is busy" in self.output


@dataclass(frozen=True)
class Outcome:
    """What DVC did with a stage: `ran` is False if it was up to date or came from the cache."""

    name: str
    ran: bool
    seconds: float


def run_stage(
    name: str,
    root: Path,
    environment: Mapping[str, str] | None = None,
    line: Callable[[str], None] = print,
) -> Outcome:
    """Run one stage in the checkout at `root`; its output goes to `line`. Raises StageFailed."""
    started = time.monotonic()
    seen: list[str] = []

    def take(text: str) -> None:
        seen.append(text)
        line(text)

    code = run_dvc(["--wait-for-lock", "repro", "--single-item", name], root, environment, take)
    output = "\n".join(seen)
    if code:
        raise StageFailed(name, code, output)
    return Outcome(name, f"Running stage '{name}'" in output, time.monotonic() - started)


def run_dvc(
    words: list[str],
    root: Path,
    environment: Mapping[str, str] | None = None,
    line: Callable[[str], None] | None = None,
) -> int:
    """Run a DVC command in a session of its own; its exit code. Without `line` it writes to this terminal."""
    env = dict(os.environ) | dict(environment or {})
    # the stage's `python` is the one that runs us, on whatever PATH we were started
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env[SUPERVISOR] = str(os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *words],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE if line else None,
        stderr=subprocess.STDOUT if line else None,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with _guard:
        _running.add(process)
    try:
        if line and process.stdout:
            for text in process.stdout:
                line(text.rstrip("\n"))
        return process.wait()
    except BaseException:
        stop(process)
        raise
    finally:
        with _guard:
            _running.discard(process)


def stop(process: subprocess.Popen, grace_s: float = GRACE_S) -> None:
    """TERM to the whole session; KILL to what is left of it after `grace_s`."""
    _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        process.poll()
        if not _signal(process, 0):
            return
        time.sleep(0.2)
    _signal(process, signal.SIGKILL)
    process.wait()


def stop_all() -> None:
    """TERM to every command that runs, without waiting; for signal handlers."""
    for process in list(_running):
        _signal(process, signal.SIGTERM)


def _signal(process: subprocess.Popen, number: int) -> bool:
    """Send a signal to the session's process group; False if nobody is left in it."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
