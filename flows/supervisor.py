"""Holds one command and everything it starts: when its flow is gone, all of it goes. Standard library only.

    python flows/supervisor.py GRACE_S COMMAND ...        (standard input: a pipe that the flow holds open)

A flow can die in ways that no handler sees (SIGKILL, out of memory). The kernel then closes the pipe, and the
supervisor ends the tree: TERM to the process group, KILL after GRACE_S to every descendant. Descendants that
left the group or lost their parent are found too, because orphans are handed to the supervisor (a child
subreaper). What a command leaves behind when it ends by itself, such as a server, is ended in the same way.
If the supervisor itself is killed, the kernel kills the command (PDEATHSIG). Exit code: the command's, or
128 + the signal that ended it.
"""

from __future__ import annotations

from collections.abc import Iterator
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, by /proc; zombies are left out."""
    children: dict[int, list[int]] = {}
    for child, parent in _processes():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _processes() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it ended in between
            continue
        if state != b"Z":
            yield int(name), int(parent)


def main(arguments: list[str]) -> int:
    grace_s, command = float(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # the group gets the same signal; the supervisor stays until the group is gone
        signal.signal(number, lambda sent, frame: asked.append(sent))

    def prepare() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    code: int | None = None
    deadline: float | None = None
    alone = False
    while True:
        code = _reap(child.pid, code)
        if asked or alone or code is not None:
            left = descendants(os.getpid())
            if code is not None and not left:
                return code
            if deadline is None:
                deadline = time.monotonic() + grace_s
                _send(left, signal.SIGTERM)
            elif time.monotonic() > deadline:
                _send(left, signal.SIGKILL)
        if alone:
            time.sleep(POLL_S)
        else:
            alone = _flow_is_gone()


def _flow_is_gone() -> bool:
    readable, _, _ = select.select([0], [], [], POLL_S)
    return bool(readable) and not os.read(0, 4096)


def _reap(pid: int, code: int | None) -> int | None:
    """Take in all children that ended; the exit code of `pid` if it was among them."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code if code is not None else 255
        if not ended:
            return code
        if ended == pid:
            raw = os.waitstatus_to_exitcode(status)
            code = raw if raw >= 0 else 128 - raw


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
