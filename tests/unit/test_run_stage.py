"""One stage by DVC: what it says about the end, and which ends are worth another try."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

import pytest

from flows.run_stage import PATIENCE_S, STAGE_PYTHON, StageFailed, run_dvc, run_module, run_stage, stop

DVC_YAML = """
stages:
  make:
    cmd: python make.py
    params: [seed]
    outs: [made]
  refuse:
    cmd: >-
      echo "refuse: rl.jsonl has 3 rows without an answer; correct them" && exit 1
    outs: [never]
  die:
    cmd: kill -9 $$
    outs: [never-either]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    (tmp_path / "make.py").write_text(
        "import os; open('made', 'w').write(os.environ.get('PIPELINE_RUN_ID', ''))\n"
    )
    monkeypatch.delenv("PIPELINE_RUN_ID", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # as a worker may be started, without the environment on it
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "init", "-q", "--no-scm"],
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_dvc_decides_whether_a_stage_runs(toy):
    lines: list[str] = []
    first = run_stage("make", toy, {"PIPELINE_RUN_ID": "abc"}, lines.append)
    assert (first.name, first.ran) == ("make", True)
    assert (toy / "made").read_text() == "abc"
    assert any("python make.py" in line for line in lines)
    assert not run_stage("make", toy, {"PIPELINE_RUN_ID": "xyz"}, lines.append).ran
    (toy / "made").unlink()
    assert not run_stage("make", toy, line=lines.append).ran  # from the cache
    assert (toy / "made").read_text() == "abc"


def test_a_stage_that_says_why_it_ends_is_not_tried_again(toy):
    with pytest.raises(StageFailed) as failure:
        run_stage("refuse", toy, line=lambda text: None)
    assert str(failure.value).endswith("rl.jsonl has 3 rows without an answer; correct them")
    assert not failure.value.transient


def test_a_stage_that_was_killed_is_tried_again(toy):
    with pytest.raises(StageFailed) as failure:
        run_stage("die", toy, line=lambda text: None)
    assert failure.value.transient


@pytest.mark.parametrize(
    ("output", "transient"),
    [
        ("ERROR: Unable to acquire lock. Most likely another DVC process is running", True),
        ("'data/x' is busy, it is being blocked by: (PID 7)", True),
        ("ERROR: failed to run: python -m stages.sft, exited with 2", False),
        ("  exitcode  : -9 (pid: 4711)", True),
        ("  traceback : Signal 9 (SIGKILL) received by PID 4711", True),
        ("  exitcode  : 1 (pid: 4711)", False),
        ("", False),
    ],
)
def test_which_failures_pass_by_themselves(output, transient):
    assert StageFailed("sft", 255, output).transient is transient


def test_a_failure_tells_no_secret(monkeypatch):
    monkeypatch.setenv("OBJECT_STORE_SECRET", "s3cr3t-of-the-store")
    failure = StageFailed("sft", 1, "sft: PUT https://me:pass@host/x with s3cr3t-of-the-store was refused")
    assert str(failure) == "stage sft failed (exit 1): PUT https://***@host/x with *** was refused"


def test_what_another_commit_left_in_a_clone_is_not_in_the_way(toy, monkeypatch):
    monkeypatch.setenv(PATIENCE_S, "0")
    (toy / "dvc.yaml").write_text(
        "stages:\n"
        "  make: {cmd: echo one > made, outs: [made]}\n"
        "  use: {cmd: cp made used, deps: [made], outs: [used]}\n"
    )
    assert run_dvc(["remote", "add", "-d", "store", str(toy / "store")], toy) == 0
    run_stage("make", toy, upstream=[])
    (toy / "made").unlink()
    (toy / "made").write_text("of another commit, in no cache")
    assert run_stage("use", toy, line=lambda text: None, upstream=["make"]).ran
    assert (toy / "used").read_text() == "one\n"


def test_stop_reaches_the_children_of_a_command_and_kills_what_does_not_listen(tmp_path: Path):
    script = (
        "import signal, subprocess, time; signal.signal(15, signal.SIG_IGN); subprocess.run(['sleep', '60'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    stop(process, grace_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_command_without_a_project_ends_with_dvcs_exit_code(tmp_path: Path):
    assert run_dvc(["status"], tmp_path, {"DVC_NO_ANALYTICS": "1"}, lambda text: None) != 0


def test_a_module_runs_by_the_interpreter_of_its_pool(tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    (tmp_path / "who.py").write_text(f"import os, sys\nprint(sys.executable, os.environ[{STAGE_PYTHON!r}])\n")
    said: list[str] = []
    assert run_module(["who"], tmp_path, {STAGE_PYTHON: str(python)}, said.append) == 0
    assert said == [f"{python} {python}"]  # what it starts in turn finds the same
