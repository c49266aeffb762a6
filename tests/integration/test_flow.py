"""The whole pipeline at `scale=smoke` by the Prefect flow, then what a person does next.

One run is shared by all tests of this file, in order: no-op, a changed parameter, and stages that are killed
with -9 in the middle and must end with the very bytes of the unbroken run.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
from pathlib import Path
import shutil
import subprocess
import sys
import time

from mlflow import MlflowClient
import psutil
import pytest

from flows.plan import inconsistencies, make_plan, read_lock
from tests.repository import copy_repository, environment

pytestmark = [pytest.mark.slow, pytest.mark.lifecycle, pytest.mark.timeout(600)]

STAGES = [
    "download",
    "validate",
    "sft",
    "para_grpo",
    "evaluate@base",
    "evaluate@sft",
    "evaluate@para_grpo",
    "report",
]


def run(folder: Path, *words: str, seconds: float = 400) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """A copy of the repository in which the flow has run once."""
    folder = tmp_path_factory.mktemp("clone")
    copy_repository(folder, ["scale=smoke", "sft.steps=3", "grpo.steps=3"])
    shutil.copyfile(empty_store, folder / "mlflow.db")
    done = run(folder, "flows.pipeline")
    assert done.returncode == 0, done.stdout[-5000:]
    yield folder


def tracked(folder: Path) -> list:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paravt")
    return list(client.search_runs([experiment.experiment_id], max_results=200))


def test_the_flow_makes_everything_and_tracks_it(smoke):
    assert list(read_lock(smoke)) and inconsistencies(read_lock(smoke)) == []
    for path in (
        "models/para_grpo/model.safetensors",
        "reports/report/report.html",
        "data/prepared/report.json",
    ):
        assert (smoke / path).is_file()
    runs = {item.info.run_name: item for item in tracked(smoke)}
    assert set(runs) == {"pipeline", *STAGES}
    assert {item.info.status for item in runs.values()} == {"FINISHED"}
    parent = runs.pop("pipeline")
    assert {item.data.tags["mlflow.parentRunId"] for item in runs.values()} == {parent.info.run_id}
    assert "prefect.flow_run_id" in parent.data.tags
    assert parent.data.tags["stage.evaluate_sft"] == runs["evaluate@sft"].info.run_id
    assert len({item.data.tags["pipeline.hash"] for item in [parent, *runs.values()]}) == 1
    assert runs["para_grpo"].data.metrics["reward/total"] >= 0
    for name, entry in read_lock(smoke).items():
        for out in entry["outs"]:
            assert runs[name].data.tags[f"dvc.out.{out['path']}"] == out["md5"]


def test_outputs_hold_no_times_and_no_run_ids(smoke):
    ids = {item.info.run_id for item in tracked(smoke)}
    for folder in ("data/prepared", "reports"):
        for path in (smoke / folder).rglob("*"):
            if path.suffix in (".json", ".jsonl", ".csv", ".md", ".html"):
                text = path.read_text(encoding="utf-8")
                assert not any(run_id in text for run_id in ids), path
                assert str(smoke) not in text, path


def test_dvc_and_a_second_flow_find_nothing_to_do(smoke):
    assert str(make_plan(smoke)) == "nothing to do: all stages are up to date"
    before = (smoke / "dvc.lock").read_bytes()
    done = run(smoke, "flows.repro")
    assert done.returncode == 0 and "nothing to do" in done.stdout, done.stdout
    assert "Running stage" not in done.stdout
    assert (smoke / "dvc.lock").read_bytes() == before
    assert len(tracked(smoke)) == 1 + len(STAGES)


def test_one_changed_parameter_runs_only_what_depends_on_it(smoke):
    params = smoke / "params.yaml"
    text = params.read_text()
    params.write_text(text.replace("kl_weight: 0.01", "kl_weight: 0.02"))
    assert [step.node.name for step in make_plan(smoke).steps] == [
        "para_grpo",
        "evaluate@para_grpo",
        "report",
    ]
    params.write_text(text)
    assert make_plan(smoke).steps == ()


def saved_first_step(folder: Path, stage: str) -> bool:
    """True once the stage, not finished yet, has the checkpoint of its first step."""
    marks = [path for path in folder.glob(".scratch/*/stage.json") if (path.parent / "step-1").exists()]
    return any(json.loads(path.read_text()) == {"stage": stage, "finished": False} for path in marks)


@pytest.mark.parametrize("stage", ["sft", "para_grpo"])
def test_kill_9_in_the_middle_changes_nothing_in_the_end(smoke, stage):
    before = (smoke / "dvc.lock").read_bytes()
    metrics = (smoke / "reports" / stage / "metrics.jsonl").read_bytes()
    # forced, or DVC would take the outputs from its cache instead of making them
    forced = ["dvc", "repro", "--force", "--single-item", stage]
    killed = subprocess.Popen(
        [sys.executable, "-m", *forced],
        cwd=smoke,
        env=environment(smoke),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 120
    while not saved_first_step(smoke, stage):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    for child in psutil.Process(killed.pid).children(recursive=True):
        child.kill()
    assert killed.wait(timeout=60) != 0
    assert not (smoke / "models" / stage).exists()
    done = run(smoke, *forced)
    assert done.returncode == 0, done.stdout
    assert (smoke / "dvc.lock").read_bytes() == before
    assert (smoke / "reports" / stage / "metrics.jsonl").read_bytes() == metrics
    (newest, *_) = [item for item in tracked(smoke) if item.info.run_name == stage]
    assert (newest.info.status, newest.data.tags["attempts"]) == ("FINISHED", "2")
    assert make_plan(smoke).steps == ()
