"""Runs one command that must not outlive its starter: `launcher.py DESCRIPTOR GRACE_S COMMAND...`.

The starter holds the other end of the pipe DESCRIPTOR. When it closes that end, or dies in whatever way, the
kernel closes it, and the launcher ends the command: TERM to the whole process group, KILL to what is left of
it after GRACE_S seconds. The launcher leads the group and goes down with it, so that nothing is left behind.
Should the launcher itself be killed, the command gets a TERM from the kernel.

Standard library alone: it starts in a few hundredths of a second, and no import can fail.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def main() -> None:
    descriptor, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what we send to the group is not meant for us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.getpid()

    def tie() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != own:  # it died in between
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)
    while child.poll() is None and not select.select([descriptor], [], [], POLL_S)[0]:
        pass
    if child.poll() is None:
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
    else:
        print(f"launcher: the command ended by itself, exit code {child.returncode}", flush=True)
    os.killpg(0, signal.SIGKILL)  # helpers of the command that are left, and this process


if __name__ == "__main__":
    main()
