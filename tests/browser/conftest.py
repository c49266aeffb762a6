"""Four real arms on a real server, and a real browser to look at them with.

The arms are trained and evaluated at `scale=smoke` in a copy of the repository, starting from the base model.
Pictures are kept in $PARAVT_SCREENSHOTS, by default .scratch/screenshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from stages.params import check, compose, dump
from tests.chromium import browser, pictures
from tests.mlflow_server import MlflowServer
from tests.repository import copy_repository, environment

__all__ = ["browser", "pictures"]
ARMS = ("para_grpo", "vanilla_grpo", "anchoring_only", "gating_only")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[tuple[MlflowServer, Path]]:
    """The server with the arms' runs, and the copy of the repository that made them."""
    clone, place = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("server")
    shutil.copyfile(empty_store, place / "mlflow.db")
    server = MlflowServer(place / "mlflow.db")
    server.start()
    try:
        copy_repository(clone, ["scale=smoke"])
        for arm in ARMS:
            data = compose(["scale=smoke", f"method={arm}"])
            check(data)
            (clone / "params.yaml").write_text(dump(data), encoding="utf-8")
            # the report is that of the first arm
            run(clone, server, "flows.repro", *([] if arm == ARMS[0] else ["evaluate@para_grpo"]))
            if arm == ARMS[0]:
                run(clone, server, "stages.registry", "promote", "--force", "--reason", "the first model")
        yield server, clone
    finally:
        server.kill()


def run(clone: Path, server: MlflowServer, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=clone,
        env=environment(clone) | {"MLFLOW_TRACKING_URI": server.uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:]
