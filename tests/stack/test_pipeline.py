"""The real pipeline at `scale=smoke` on two workers: cancelled in the middle of para_grpo, started again."""

from __future__ import annotations

from pathlib import Path
import time

from mlflow import MlflowClient
import psutil
import pytest

from flows.plan import inconsistencies, read_lock
from tests.repository import STAGES, copy_repository, git
from tests.stack.conftest import World, command

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


def test_cancelled_in_para_grpo_then_finished_and_a_fresh_clone_executes_nothing(world: World, tmp_path):
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    folder = tmp_path / "copy"
    copy_repository(folder, ["scale=smoke"])
    git(folder, "push", "-q", str(world.origin), "HEAD:refs/heads/smoke")

    run = world.start(ref="smoke")
    trainer = world.until(lambda: processes(world, "stages.para_grpo"), 400)[0]
    started = time.monotonic()
    tree = [trainer, *trainer.children(recursive=True)]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
    world.until(lambda: not any(process.is_running() for process in tree), 60)
    print(f"cancel to the last process of para_grpo gone: {time.monotonic() - started:.1f} s")
    assert time.monotonic() - started < 30
    # the flow says first that it was ended; that it was asked to, the worker adds
    world.until(lambda: world.state(run).is_cancelled(), 60)
    branch = world.recorded("smoke-")
    assert "Result of sft" in git(world.origin, "log", "--format=%s", branch)

    again = world.start(ref="smoke")
    assert world.end(again, 500).is_completed()
    sent = {child.name.split()[0] for child in world.children(again)}
    assert "para_grpo" in sent and not sent & {"download", "validate", "sft"}

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--branch", branch, str(world.origin), str(clone))
    assert list(read_lock(clone)) and inconsistencies(read_lock(clone)) == []
    store = world.stack.environment["PARAVT_DVC_REMOTE"]
    assert command(clone, "dvc", "remote", "add", "--local", "--default", "store", store).returncode == 0
    done = command(clone, "dvc", "repro", "--pull", PYTHONPATH=str(clone))
    assert done.returncode == 0 and "Running stage" not in done.stdout, done.stdout + done.stderr
    assert (clone / "reports/report/report.html").is_file()

    client = MlflowClient(world.stack.environment["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("paravt")
    runs = client.search_runs([experiment.experiment_id], max_results=500)
    parents = {item.info.run_id: item for item in runs if item.data.tags["dvc.stage"] == "pipeline"}
    mine = {item.data.tags.get("prefect.flow_run_id"): key for key, item in parents.items()}
    below = {
        item.data.tags["dvc.stage"]: item
        for item in runs
        if item.data.tags.get("mlflow.parentRunId") in (mine[str(run.id)], mine[str(again.id)])
        and item.info.status == "FINISHED"
    }
    assert set(below) == set(STAGES)
    judged_and_asked_again(world, client, branch)


def judged_and_asked_again(world: World, client: MlflowClient, branch: str) -> None:
    """A branch is promoted by its deployment; then its model is asked again, and answers as it did."""

    def ended(deployment: str, **parameters):
        return world.end(world.start(deployment, **parameters))

    state = ended("paravt-promotion/branch", ref=branch, ask=False)
    assert state.is_completed(), state.message
    (version,) = client.search_model_versions("name = 'paravt-smoke'")
    assert version.tags["git.sha"] and version.tags["promotion.against"] == "sft"
    alias = "champion" if version.tags["promotion.decision"] == "promoted" else "candidate"

    state = ended("evaluation/registered", ref=branch, alias=alias)
    assert state.is_completed(), state.message
    tags = client.get_model_version("paravt-smoke", version.version).tags
    assert "+0.000 [+0.000, +0.000]" in tags["evaluation.reason"]
    assert client.get_run(tags["evaluation.run"]).data.tags["registered.version"] == str(version.version)
    assert ended("evaluation/registered", ref=branch, alias=alias, registry="nobody").is_failed()


def processes(world: World, module: str) -> list[psutil.Process]:
    """Living processes of a stage below the stack."""
    found = []
    for part in world.stack.parts.values():
        for process in psutil.Process(part.pid).children(recursive=True):
            try:
                if process.cmdline()[1:3] == ["-m", module]:
                    found.append(process)
            except psutil.Error:
                continue
    return found


def test_the_stack_is_below_its_memory_limit(world: World):
    gib = world.stack.memory_gib()
    print(f"stack at rest: {gib:.2f} GiB")
    assert gib < 2.5


def test_a_stack_that_is_stopped_leaves_nothing(tmp_path: Path):
    """Ctrl-C to `make stack`, with its parts just started."""
    import signal
    import subprocess
    import sys

    from tests.stack.conftest import free_port

    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    stack = subprocess.Popen(
        [sys.executable, "-m", "flows.stack", "--home", str(tmp_path / "home"), *ports],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "home/logs/mlflow.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(stack.pid).children(recursive=True)
    assert len(children) >= 2
    stack.send_signal(signal.SIGINT)
    assert stack.wait(60) == 0
    assert not [child for child in children if child.is_running()]
