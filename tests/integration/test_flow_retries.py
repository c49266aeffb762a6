"""What the flow does when stages fail: finished work is not repeated, hopeless work is not tried again."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import subprocess
import sys

import pytest

from stages.params import ROOT, compose, dump

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DVC_YAML = """
stages:
  train:
    cmd: echo x >> train.runs && echo weights > weights
    outs: [weights]
  evaluate:
    cmd: echo x >> evaluate.runs && if [ ! -e second ]; then touch second && kill -9 $$; fi && echo 1 > score
    deps: [weights]
    outs: [score]
  refuse:
    cmd: >-
      echo x >> refuse.runs && echo "refuse: a column is missing" && exit 1
    outs: [table]
  report:
    cmd: echo x >> report.runs && echo page > page
    deps: [score, table]
    outs: [page]
"""


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory) -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=90):
        yield


@pytest.fixture
def toy(project: Path, monkeypatch) -> Path:
    (project / "dvc.yaml").write_text(DVC_YAML)
    (project / "params.yaml").write_text(dump(compose()))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], check=True, timeout=60)
    return project


def runs_of(toy: Path, stage: str) -> int:
    path = toy / f"{stage}.runs"
    return path.read_text().count("x") if path.exists() else 0


def test_a_killed_stage_is_tried_again_and_a_finished_one_is_not(prefect_server, toy):
    from flows.pipeline import pipeline

    outcomes = pipeline(str(toy), ["evaluate"])
    assert [(outcome.name, outcome.ran) for outcome in outcomes] == [("train", True), ("evaluate", True)]
    assert (runs_of(toy, "train"), runs_of(toy, "evaluate")) == (1, 2)
    assert pipeline(str(toy), ["evaluate"]) == []


def test_a_refusal_is_final_and_what_it_feeds_is_not_started(prefect_server, toy):
    from flows.pipeline import PipelineFailed, pipeline

    (toy / "second").touch()
    with pytest.raises(PipelineFailed) as failure:
        pipeline(str(toy))
    assert "a column is missing" in str(failure.value)
    assert "not started: report" in str(failure.value)
    assert {name: runs_of(toy, name) for name in ("train", "evaluate", "refuse", "report")} == {
        "train": 1,
        "evaluate": 1,
        "refuse": 1,
        "report": 0,
    }
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{toy / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paravt")
    (parent,) = client.search_runs([experiment.experiment_id])
    assert (parent.data.tags["dvc.stage"], parent.info.status) == ("pipeline", "FAILED")
