"""The pipeline on real workers: what holds when stages fail, machines die and two want the same.

Each test has a branch of its own, whose commit makes all three stages of the miniature new.
"""

from __future__ import annotations

import os
from pathlib import Path
import signal
import time

import psutil
import pytest

from flows.plan import inconsistencies, read_lock
from tests.repository import git
from tests.stack.conftest import World, command

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(700)]


def test_first_run_no_op_changed_parameter_and_a_fresh_clone(world: World, tmp_path: Path):
    commit = world.branch("plain", "plain")
    started = time.monotonic()
    run = world.start(ref="plain")
    state = world.end(run)
    print(f"first run {time.monotonic() - started:.1f} s")
    assert state.is_completed(), state.message
    assert world.counts("plain") == (1, 1, 1)
    assert len(world.children(run)) == 3

    branch = world.recorded("plain-")
    assert git(world.origin, "log", "--format=%s", f"{commit}..{branch}").splitlines() == [
        "Result of last",
        "Result of train",
        "Result of first",
    ]

    started = time.monotonic()
    again = world.start(ref="plain")
    assert world.end(again).is_completed()
    print(f"no-op {time.monotonic() - started:.1f} s")
    assert world.children(again) == []

    changed = world.start(ref=branch, overrides=["scale=smoke", "grpo.kl_weight=0.02"])
    assert world.end(changed).is_completed()
    assert world.counts("plain") == (1, 2, 1)  # train wrote what it wrote before, so nothing below it ran

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--branch", branch, str(world.origin), str(clone))
    store = world.stack.environment["PARAVT_DVC_REMOTE"]
    assert command(clone, "dvc", "remote", "add", "--local", "--default", "store", store).returncode == 0
    done = command(clone, "dvc", "repro", "--pull", EVIDENCE=str(world.evidence))
    assert done.returncode == 0 and "Running stage" not in done.stdout, done.stdout + done.stderr
    assert (clone / "last.txt").read_text() == "plain last\n"
    assert world.counts("plain") == (1, 2, 1)
    assert inconsistencies(read_lock(clone)) == []


def test_a_stage_that_is_killed_once_is_sent_again_alone(world: World):
    world.branch("once", "once")
    (world.evidence / "kill-once-train").touch()
    assert world.end(world.start(ref="once")).is_completed()
    assert world.counts("once") == (1, 2, 1)


def test_cancel_ends_the_whole_tree_within_30_s(world: World):
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    world.branch("cancel", "cancel")
    hold = world.hold("cancel", "train")
    run = world.start(ref="cancel")
    (pid,) = world.until(lambda: world.ran("cancel", "train"), 300)
    stage = psutil.Process(pid)
    (server,) = world.until(stage.children)
    started = time.monotonic()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
    world.until(lambda: not stage.is_running() and not server.is_running(), 60)
    seconds = time.monotonic() - started
    print(f"cancel to the last child gone: {seconds:.1f} s")
    assert seconds < 30
    world.until(lambda: world.state(run).is_cancelled(), 60)
    hold.unlink()


def test_a_parent_that_is_killed_and_started_again_repeats_nothing(world: World):
    world.branch("parent", "parent")
    hold = world.hold("parent", "train")
    run = world.start(ref="parent")
    world.until(lambda: world.ran("parent", "train"), 300)
    for process in flow_processes(world, str(run.id)):
        os.kill(process.pid, signal.SIGKILL)
    assert world.end(run).is_crashed()
    again = world.start(ref="parent")
    world.until(lambda: world.state(again).is_running())
    hold.unlink()
    assert world.end(again).is_completed()
    assert world.counts("parent") == (1, 1, 1)


def test_a_remote_that_is_away_costs_no_training(world: World):
    world.branch("away", "away")
    hold = world.hold("away", "train")
    run = world.start(ref="away")
    world.until(lambda: world.ran("away", "train"), 300)
    remote = Path(world.stack.environment["PARAVT_DVC_REMOTE"])
    kept = remote.with_name("kept")
    remote.rename(kept)
    remote.write_text("not a folder")
    try:
        hold.unlink()
        log = world.stack.log("worker-gpu")
        world.until(lambda: "dvc push failed" in log.read_text(errors="replace"), 60)
    finally:
        remote.unlink()
        kept.rename(remote)
    assert world.end(run).is_completed()
    assert world.counts("away") == (1, 1, 1)


def test_a_worker_that_is_killed_is_replaced(world: World):
    world.branch("worker", "worker")
    hold = world.hold("worker", "train")
    run = world.start(ref="worker")
    (pid,) = world.until(lambda: world.ran("worker", "train"), 300)
    stage = psutil.Process(pid)
    part = world.stack.parts.pop("worker-gpu")
    # as by a machine short of memory: the worker and its flow at once; the stage's supervisor then ends it
    worker = psutil.Process(part.pid)
    below = worker.children(recursive=True)
    supervisors = [p for p in below if any(word.endswith("supervisor.py") for word in p.cmdline())]
    assert len(supervisors) == 1
    spared = {supervisors[0].pid, *(p.pid for p in supervisors[0].children(recursive=True))}
    for process in [worker, *below]:
        if process.pid not in spared:
            process.kill()
    part.wait()
    world.until(lambda: not stage.is_running(), 30)
    hold.unlink()
    world.stack.start_worker("gpu-2", "gpu")
    assert world.end(run, 500).is_completed()
    assert world.counts("worker") == (1, 2, 1)


def test_two_pipelines_of_the_same_commit_share_their_stages(world: World):
    world.branch("two", "two")
    runs = [world.start(ref="two"), world.start(ref="two")]
    assert [world.end(run).is_completed() for run in runs] == [True, True]
    assert world.counts("two") == (1, 1, 1)


@pytest.mark.parametrize("ref", ["--upload-pack=touch", "../main", "no-such-branch"])
def test_a_name_that_is_no_branch_is_refused_and_somebody_is_told(world: World, ref: str):
    run = world.start(ref=ref)
    state = world.end(run)
    note = world.until(lambda: next((note for note in world.told if run.name in note["subject"]), None))
    assert note["subject"] == f"ParaVT pipeline {run.name}: Failed" and note["text"] in state.message
    assert state.is_failed() and ("is no name of a branch" in state.message or "no branch" in state.message)


def test_a_branch_named_like_a_command_is_only_a_name(world: World):
    name = "$(touch${IFS}pwned);touch${IFS}pwned;'"
    world.branch(name, "hostile")
    assert world.end(world.start(ref=name)).is_completed()
    assert world.counts("hostile") == (1, 1, 1)
    assert list(world.stack.home.rglob("pwned")) == []
    assert world.recorded("touch-ifs-pwned-")


def flow_processes(world: World, run_id: str) -> list[psutil.Process]:
    """The processes that execute a flow run."""
    found = []
    for part in world.stack.parts.values():
        for process in psutil.Process(part.pid).children(recursive=True):
            try:
                if process.environ().get("PREFECT__FLOW_RUN_ID") == run_id:
                    found.append(process)
            except psutil.Error:
                continue
    return found
