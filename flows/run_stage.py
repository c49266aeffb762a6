"""One stage, run by DVC, under supervision: the one way in which flows run anything.

    dvc --wait-for-lock repro --single-item NAME              in a checkout that holds the data
    dvc pull UPSTREAM; dvc repro -s --pull NAME; dvc push     on a worker, whose checkout holds none

DVC decides whether the stage really runs, takes it from the cache or has nothing to do; the caller's cache
never does. Without the pull of the upstream first, `--single-item --pull` takes absent inputs for unchanged
and skips a stale stage. The command runs under `flows.supervisor` in a session of its own, so that a stop
reaches DVC and the stage, and nothing outlives the flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

from stages.redact import redact
from stages.tracking.lifeline import SUPERVISOR

GRACE_S = 15.0  # a stage that is stopped closes its run, then ends
PATIENCE_S = "PARAVT_REMOTE_PATIENCE_S"  # how long a remote may be away before a stage is given up
STAGE_PYTHON = "STAGE_PYTHON"  # in the environment given to a stage: the interpreter of its pool
SUPERVISE = Path(__file__).with_name("supervisor.py")
# in the words of DVC, and of torch for one of several processes
KILLED = re.compile(r"exited with (?:-9|137)\b|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
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
        super().__init__(redact(f"stage {name} failed (exit {code}): {words.removeprefix(f'{name}: ')}"))

    @property
    def transient(self) -> bool:
        """True if the stage was killed from outside or DVC was busy, not if the stage said why it ends."""
        return (
            bool(KILLED.search(self.output))
            or "Unable to acquire lock" in self.output
            or "is busy" in self.output
        )


class RemoteAway(StageFailed):
    """The DVC remote did not answer, or lacks what a stage reads."""

    @property
    def transient(self) -> bool:
        return True


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
    upstream: Sequence[str] | None = None,
    held: Sequence[int] = (),
) -> Outcome:
    """Run one stage in the checkout at `root`; its output goes to `line`. Raises StageFailed.

    With `upstream` (the stages that it reads from, none of them too) the checkout holds no data: what the
    stage reads is pulled first and what it made is pushed. `held` are file descriptors that stay open as long
    as anything of the stage lives.
    """
    started = time.monotonic()
    seen: list[str] = []

    def take(text: str) -> None:
        seen.append(text)
        line(text)

    words = ["--wait-for-lock", "repro", "--single-item"]
    if upstream is not None:
        words.append("--pull")
        if upstream:
            # what another commit's stage left in this clone is in the way, and in the cache
            _transfer(name, ["pull", "--force", *upstream], root, environment, line, held)
    code = run_dvc([*words, name], root, environment, take, held)
    output = "\n".join(seen)
    if code:
        raise StageFailed(name, code, output)
    if upstream is not None:
        _transfer(name, ["push", name], root, environment, line, held)
    return Outcome(name, f"Running stage '{name}'" in output, time.monotonic() - started)


def _transfer(
    name: str,
    words: list[str],
    root: Path,
    environment: Mapping[str, str] | None,
    line: Callable[[str], None],
    held: Sequence[int],
) -> None:
    """`dvc pull` or `dvc push`, again and again while the remote is away: a trained model can wait for it.

    Raises RemoteAway after PARAVT_REMOTE_PATIENCE_S (600) seconds.
    """
    deadline = time.monotonic() + float(os.environ.get(PATIENCE_S, "600"))
    wait_s = 2.0
    while True:
        seen: list[str] = []
        code = run_dvc(["--wait-for-lock", *words], root, environment, seen.append, held)
        if code == 0:
            return
        if time.monotonic() + wait_s > deadline:
            output = "\n".join(seen)
            raise RemoteAway(name, code, f"{output}\n{name}: dvc {words[0]} failed: {cause(seen)}")
        line(f"{name}: dvc {words[0]} failed ({cause(seen)}); again in {wait_s:.0f} s")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 60.0)


def cause(lines: Sequence[str]) -> str:
    """The line in which DVC says what is wrong."""
    said = [text.strip() for text in lines if text.strip()]
    return next((text for text in said if text.startswith("ERROR")), said[-1] if said else "no output")


def run_dvc(
    words: list[str],
    root: Path,
    environment: Mapping[str, str] | None = None,
    line: Callable[[str], None] | None = None,
    held: Sequence[int] = (),
) -> int:
    """Run a DVC command under the supervisor; its exit code. Without `line` it writes to this terminal."""
    _, env = _stage_python(environment)
    return _supervised([sys.executable, "-m", "dvc", *words], root, env, line, held)


def run_module(
    words: Sequence[str],
    root: Path,
    environment: Mapping[str, str] | None = None,
    line: Callable[[str], None] | None = None,
    held: Sequence[int] = (),
) -> int:
    """`python -m WORDS` under the supervisor, as `run_dvc`, by the interpreter of the pool's stages."""
    python, env = _stage_python(environment)
    return _supervised([str(python), "-m", *words], root, env, line, held)


def _stage_python(environment: Mapping[str, str] | None) -> tuple[Path, dict[str, str]]:
    """The interpreter of stages (their pool's or ours) and an environment in which it is `python`."""
    env = dict(os.environ) | dict(environment or {})
    python = Path(env.get(STAGE_PYTHON, sys.executable))
    env["PATH"] = f"{python.parent}{os.pathsep}{env.get('PATH', '')}"
    return python, env


def _supervised(
    words: Sequence[str],
    root: Path,
    env: Mapping[str, str],
    line: Callable[[str], None] | None,
    held: Sequence[int],
) -> int:
    process = subprocess.Popen(
        [sys.executable, "-S", str(SUPERVISE), str(GRACE_S), *words],
        cwd=root,
        env=dict(env) | {SUPERVISOR: str(os.getpid())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if line else None,
        stderr=subprocess.STDOUT if line else None,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=held,
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


def stop(process: subprocess.Popen, grace_s: float = GRACE_S + 5) -> None:
    """TERM to the whole session, whose supervisor ends what does not listen; KILL if even that fails."""
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
