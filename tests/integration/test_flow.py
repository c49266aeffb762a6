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
from stages.params import read_yaml
from tests.repository import STAGES, copy_repository, environment

pytestmark = [pytest.mark.slow, pytest.mark.lifecycle, pytest.mark.timeout(600)]


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
    runs = {item.data.tags["dvc.stage"]: item for item in tracked(smoke)}
    assert set(runs) == {"pipeline", *STAGES}
    assert {item.info.status for item in runs.values()} == {"FINISHED"}
    parent = runs.pop("pipeline")
    # names for people: what of method and seed the work depends on
    names = {stage: item.info.run_name for stage, item in runs.items()}
    assert names["sft"] == "sft (seed 1)" and names["para_grpo"] == "para_grpo (para_grpo, seed 1)"
    assert (
        parent.data.metrics["result/accuracy"] == runs["evaluate@para_grpo"].data.metrics["result/accuracy"]
    )
    spent = [item.data.metrics.get("cost/tokens_sampled", 0.0) for item in runs.values()]
    assert parent.data.metrics["cost/tokens_sampled"] == sum(spent) > 0
    for item in runs.values():
        assert item.data.tags["prefect.flow_run_id"] == parent.data.tags["prefect.flow_run_id"]
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


def test_the_study_starts_from_the_sft_checkpoint_and_does_nothing_twice(smoke):
    arms = smoke / "study" / "arms.yaml"
    data = read_yaml(arms) | {"scale": "smoke"}
    kept = {"main": "para_grpo", "variants": "no_tool_reward", "other_bases": "strict_vanilla"}
    data |= {group: {"arms": [arm], "seeds": [2]} for group, arm in kept.items()}
    data["bases"] = {"strict": data["bases"]["strict"] | {"steps": 2, "clips": 3}}
    data["arms"] = {name: data["arms"][name] for name in kept.values()}
    arms.write_text(json.dumps(data))
    before = len(tracked(smoke))
    done = run(smoke, "flows.study")
    assert done.returncode == 0, done.stdout[-5000:]
    runs = {"start@base", "start@sft", "main@para_grpo-2", "variants@no_tool_reward-2"}
    runs |= {"base@strict", "other_start@strict", "other_bases@strict_vanilla-2"}
    for name in runs:
        assert f"{name}: done" in done.stdout
    report = (smoke / "study/report/report.md").read_text()
    assert "Scale `smoke`" in report and "Training seeds: PARA-GRPO (2)" in report
    assert (smoke / "study/starts/strict/model.safetensors").is_file()
    results = {path.stem: json.loads(path.read_text()) for path in (smoke / "study/results").iterdir()}
    trained = {"para_grpo-2", "no_tool_reward-2", "strict_vanilla-2"}
    assert set(results) == {"base-1", "sft-1", "strict-1"} | trained
    assert len(results["para_grpo-2"]["curves"]["reward/total"]) == 2
    assert max(results["no_tool_reward-2"]["curves"]["reward/tool"]) == 0
    assert [item["budget"] for item in results["sft-1"]["asked"][:2]] == [4, 8]
    again = run(smoke, "flows.study")
    assert again.returncode == 0 and again.stdout.count("up to date,") == len(runs), again.stdout
    names = [item.data.tags["dvc.stage"] for item in tracked(smoke)]
    assert len(names) == before + len(runs) and "study-no_tool_reward" in names
    assert not list((smoke / ".scratch/study").iterdir())


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
    (newest, *_) = [item for item in tracked(smoke) if item.data.tags["dvc.stage"] == stage]
    assert (newest.info.status, newest.data.tags["attempts"]) == ("FINISHED", "2")
    assert make_plan(smoke).steps == ()
