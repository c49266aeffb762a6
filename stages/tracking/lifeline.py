"""A stage ends when it is told to, or when the command that started it is gone.

TERM, INT and HUP raise `Stopped` once in the main thread, so that a run can be closed truthfully; meanwhile
only a second Ctrl-C ends the process at once. DVC does not pass TERM on to its stage, so the stage watches
its starters (up to the `dvc` process, and the process that SUPERVISOR_PID names) and sends itself a TERM
when one of them has died: no trainer outlives its pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 1.0
SUPERVISOR = "SUPERVISOR_PID"


class Stopped(KeyboardInterrupt):
    """The process was told to end; `signal` says by what."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


@contextmanager
def lifeline(
    watch_starters: bool | None = None, on_stop: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within it signals call `on_stop` and raise `Stopped`.

    The starters are watched under DVC (DVC_STAGE is set), or as `watch_starters` says.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; the caller's own are in force
        return

    def stop(number: int, frame: object) -> None:
        # a stop reaches a stage by several ways at once; only a second Ctrl-C means "without closing the run"
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        on_stop()
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in SIGNALS}
    done = threading.Event()
    if watch_starters if watch_starters is not None else "DVC_STAGE" in os.environ:
        threading.Thread(target=_watch, args=(_starters(), done), daemon=True, name="lifeline").start()
    try:
        yield
    finally:
        done.set()
        for number, handler in previous.items():
            # None: a handler that was not set from Python; the default is all that can be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _starters() -> list:
    """The parents up to the nearest `dvc` process, itself included, and the supervisor.

    Without a `dvc` above, the direct parent.
    """
    import psutil

    supervisor = os.environ.get(SUPERVISOR, "")
    if not supervisor.isdigit():
        return _up_to_dvc()
    try:
        return [psutil.Process(int(supervisor)), *_up_to_dvc()]
    except psutil.NoSuchProcess:
        return [None]  # it was killed while the stage was starting


def _up_to_dvc() -> list:
    import psutil

    parents = psutil.Process().parents()
    for count, parent in enumerate(parents, 1):
        try:
            words = parent.cmdline()[:3]
        except psutil.Error:
            break
        if any(os.path.basename(word) == "dvc" for word in words):
            return parents[:count]
    return parents[:1]


def _watch(starters: list, done: threading.Event) -> None:
    while not done.wait(POLL_S):
        if not all(_lives(starter) for starter in starters):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _lives(process) -> bool:
    import psutil

    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
