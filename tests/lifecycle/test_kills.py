"""Whatever ends a stage: its run says so, nothing of it lives on, and the next start continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from mlflow import MlflowClient
import psutil
import pytest

from stages.params import ROOT, compose, dump
from stages.tracking import settle

pytestmark = pytest.mark.lifecycle

STAGE = """
import os, time
from pathlib import Path
from stages.command import command
from stages.tracking import stage_run

with command("work"), stage_run("work") as reporter:
    kept = reporter.scratch.folder / "step"
    first = int(kept.read_text()) if kept.exists() else 0
    for step in range(first + 1, 7):
        kept.write_text(str(step))
        reporter.metrics({"step": step}, step)
        Path("pid").write_text(str(os.getpid()))
        while step == 3 and not Path("go").exists():
            time.sleep(0.05)
    Path("made").write_text("made")
"""

DVC_YAML = """
stages:
  work:
    cmd: python work.py
    params: [seed]
    outs: [made]
    meta: {pool: cpu}
"""


@pytest.fixture
def toy(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A DVC project whose one stage waits in its third step until the file `go` is there."""
    (project / "dvc.yaml").write_text(DVC_YAML)
    (project / "params.yaml").write_text(dump(compose()))
    (project / "work.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], check=True, timeout=60)
    yield project


def start(*words: str) -> subprocess.Popen:
    """A command in a session of its own, as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def stage_process(toy: Path) -> psutil.Process:
    """The stage, in its third step and with its run open."""
    until(lambda: (toy / "pid").exists() and (toy / "pid").read_text())
    until(lambda: [run for run in runs(toy) if run.data.metrics.get("step") == 3])
    return psutil.Process(int((toy / "pid").read_text()))


def runs(toy: Path) -> list:
    client = MlflowClient(f"sqlite:///{toy / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paravt")
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def finish(toy: Path) -> None:
    """Start again by hand, without any cleaning: the run that was stopped is continued to its end."""
    (toy / "go").touch()
    done = start("dvc", "repro")
    output, _ = done.communicate(timeout=90)
    assert done.returncode == 0, output
    (run,) = [run for run in runs(toy) if run.info.run_name == "work"]
    assert (run.info.status, run.data.tags["attempts"]) == ("FINISHED", "2")
    client = MlflowClient(f"sqlite:///{toy / 'mlflow.db'}")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "step")] == [1, 2, 3, 4, 5, 6]
    assert (toy / "made").read_text() == "made"


def test_kill_9_of_the_stage(toy):
    dvc = start("dvc", "repro")
    stage_process(toy).kill()
    assert dvc.wait(timeout=60) != 0
    assert [run.info.status for run in runs(toy)] == ["RUNNING"]  # nobody was left to say it
    assert list(settle(toy).values()) == ["KILLED"]
    (run,) = runs(toy)
    assert run.info.status == "KILLED"
    assert run.info.end_time <= time.time() * 1000
    assert not (toy / "made").exists()
    finish(toy)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_dvc_alone_is_stopped_and_the_stage_ends_with_it(toy, number):
    dvc = start("dvc", "repro")
    stage = stage_process(toy)
    dvc.send_signal(number)
    dvc.wait(timeout=60)
    until(lambda: not stage.is_running(), 30)
    assert [run.info.status for run in runs(toy)] == ["KILLED"]
    if number == signal.SIGKILL:  # DVC itself left its locks behind
        finish(toy)


def test_ctrl_c(toy):
    dvc = start("dvc", "repro")
    stage_process(toy)
    os.killpg(dvc.pid, signal.SIGINT)
    output, _ = dvc.communicate(timeout=60)
    assert dvc.returncode != 0
    assert "work: stopped by SIGINT; run again to continue where it was saved last" in output
    assert [run.info.status for run in runs(toy)] == ["KILLED"]
    finish(toy)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_whole_tree_ends_with_the_command_that_started_it(toy, number):
    repro = start("flows.repro")
    stage = stage_process(toy)
    repro.send_signal(number)
    output, _ = repro.communicate(timeout=90)
    until(lambda: not stage.is_running(), 30)
    if number == signal.SIGTERM:
        assert repro.returncode == 128 + number
        assert "repro: stopped by SIGTERM; run again to continue" in output
    else:
        until(lambda: "KILLED" in settle(toy).values())
    assert {run.info.run_name: run.info.status for run in runs(toy)} == {
        "work": "KILLED",
        "para_grpo, seed 1": "KILLED",
    }


def test_a_flow_that_is_stopped_takes_its_stage_with_it(toy, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(toy / ".prefect"))
    flow = start("flows.pipeline")
    stage_process(toy)
    tree = psutil.Process(flow.pid).children(recursive=True)
    flow.send_signal(signal.SIGTERM)
    output, _ = flow.communicate(timeout=90)
    until(lambda: not any(process.is_running() for process in tree), 30)
    assert flow.returncode == 128 + signal.SIGTERM, output
    assert {run.info.run_name: run.info.status for run in runs(toy)} == {
        "work": "KILLED",
        "para_grpo, seed 1": "KILLED",
    }
