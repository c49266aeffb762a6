"""Nothing that a flow started outlives it, whatever ends the flow."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flows.run_stage import SUPERVISE

# a stage that starts a server in a session of its own, tells both pids, and waits
TREE = """
import os, subprocess, sys, time
server = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), server.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(1000)"


def supervised(*command: str, grace_s: float = 5.0) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-S", str(SUPERVISE), str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_the_exit_code_is_that_of_the_command():
    assert supervised("sh", "-c", "exit 7").wait(20) == 7
    assert supervised("sh", "-c", "kill -9 $$").wait(20) == 128 + 9


def test_a_closed_pipe_ends_the_command_and_what_left_its_session():
    process = supervised(sys.executable, "-c", TREE, "1000")
    below = tree(process)
    process.stdin.close()
    assert gone(below)
    process.wait(20)


def test_what_a_finished_command_leaves_behind_is_ended():
    process = supervised(sys.executable, "-c", TREE, "0")
    below = tree(process)
    assert process.wait(20) == 0
    assert gone(below)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_ends_all_of_it(number):
    process = supervised(sys.executable, "-c", TREE, "1000")
    below = tree(process)
    os.killpg(process.pid, number)
    process.wait(20)
    assert gone(below)


def test_who_does_not_listen_is_killed_after_the_grace():
    process = supervised(sys.executable, "-c", STUBBORN, grace_s=0.5)
    process.stdout.readline()
    started = time.monotonic()
    process.stdin.close()
    assert process.wait(20) == 128 + 9
    assert time.monotonic() - started >= 0.5


def test_a_killed_supervisor_takes_the_command_with_it():
    process = supervised(sys.executable, "-c", STUBBORN)
    process.stdout.readline()
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait(20)
    assert gone([child])


def test_a_killed_flow_takes_its_stage_with_it(tmp_path: Path):
    """The flow is a process that supervises through `run_module` and gets SIGKILL."""
    flow = (
        "import sys; from pathlib import Path; from flows.run_stage import run_module\n"
        f"run_module(['http.server', '0'], Path({str(tmp_path)!r}), line=print)"
    )
    process = subprocess.Popen([sys.executable, "-c", flow], stdout=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    while len(children) < 2:  # the supervisor and its command
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.kill()
    process.wait(20)
    assert gone(children, 30)
