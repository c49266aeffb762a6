"""What every test stands on: no telemetry, no network, and no trace left in the repository.

Tracking goes to a store of the test session; the empty store is made once and copied, since making its tables
takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import shutil
import tempfile

import pytest

from stages.environment import SETTINGS

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
# inherited from a shell or from a stage that runs the tests, these would send a test's runs elsewhere
for _name in (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "PIPELINE_RUN_ID",
    "DVC_STAGE",
):
    os.environ.pop(_name, None)
_HOME = tempfile.mkdtemp(prefix="paravt-tests-")
os.environ["PREFECT_HOME"] = f"{_HOME}/prefect"
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{_HOME}/mlflow.db"


def pytest_sessionfinish() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables made and no run in it."""
    import mlflow

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project folder that is the working folder, with a tracking store at its usual place."""
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
