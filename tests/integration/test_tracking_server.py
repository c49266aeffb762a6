"""A real server that is killed in the middle of a run: the run goes on, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import shutil
import time

from mlflow import MlflowClient
import pytest

from stages.tracking import Target, stage_run
from stages.tracking import __main__ as settle_command
from tests.mlflow_server import MlflowServer
from tests.unit.test_tracking import rollout

pytestmark = [pytest.mark.slow, pytest.mark.lifecycle, pytest.mark.timeout(600)]


@pytest.fixture
def server(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    (tmp_path / "server").mkdir()
    shutil.copyfile(empty_store, tmp_path / "server" / "mlflow.db")
    found = MlflowServer(tmp_path / "server" / "mlflow.db")
    found.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    yield found
    found.kill()


def wait_until(true, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.2)


def points(server: MlflowServer, run_id: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in MlflowClient(server.uri).get_metric_history(run_id, "loss")]


def test_a_server_that_dies_and_comes_back_in_the_middle(server, capsys):
    with stage_run("ask", {"k": 4}) as reporter:
        for step in range(1, 11):
            reporter.metrics({"loss": 1 / step}, step)
        run_id = reporter.run_id(60)
        wait_until(lambda: len(points(server, run_id)) == 10)
        server.kill()
        for step in range(11, 21):
            began = time.monotonic()
            reporter.metrics({"loss": 1 / step}, step)
            assert time.monotonic() - began < 1.0  # the work never waits for the server
        reporter.rollouts([rollout()], 20)
        reporter.text("kept while the server was away", "note.txt")
        wait_until(lambda: reporter.sender.error is not None)
        server.start()
        for step in range(21, 31):
            reporter.metrics({"loss": 1 / step}, step)
        wait_until(lambda: reporter.sender.error is None)
    found = MlflowClient(server.uri).get_run(run_id)
    assert found.info.status == "FINISHED"
    assert points(server, run_id) == [(step, 1 / step) for step in range(1, 31)]  # each once, in order
    assert [item.path for item in MlflowClient(server.uri).list_artifacts(run_id)] == ["note.txt"]
    assert not list(Path(".scratch/tracking").iterdir())
    page = Target(Path.cwd()).page(run_id)
    assert page == f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/{run_id}"
    assert page in capsys.readouterr().out  # MLflow's own words, which Prefect shows in a stage's log


def test_a_run_that_ends_while_the_server_is_away_is_sent_by_settle(server, capsys):
    with stage_run("ask") as reporter:
        reporter.metrics({"loss": 1.0}, 1)
        run_id = reporter.run_id(60)
        wait_until(lambda: len(points(server, run_id)) == 1)
        server.kill()
        reporter.metrics({"loss": 0.5}, 2)
        wait_until(lambda: reporter.sender.error is not None)
    server.start()
    assert MlflowClient(server.uri).get_run(run_id).info.status == "RUNNING"
    assert settle_command.main() == 0  # what `make settle` runs
    assert "FINISHED" in capsys.readouterr().out
    assert MlflowClient(server.uri).get_run(run_id).info.status == "FINISHED"
    assert points(server, run_id) == [(1, 1.0), (2, 0.5)]
