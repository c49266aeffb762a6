"""Four real arms on a real server, and a real browser to look at them with.

The arms are trained and evaluated at `scale=smoke` in a copy of the repository, starting from the base model.
Pictures are kept in $PARAVT_SCREENSHOTS, by default .scratch/screenshots.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from stages.params import ROOT, check, compose, dump
from tests.mlflow_server import MlflowServer
from tests.repository import copy_repository, environment

ARMS = ("para_grpo", "vanilla_grpo", "anchoring_only", "gating_only")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """A headless Chromium; skips with the command that installs what is missing."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing; run `make setup-browser`"
    )
    if CHROMIUM is None:
        pytest.skip(
            "no Chromium is installed; run `make setup-browser`, or on Debian: apt-get install chromium"
        )
    with driver.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    folder = Path(os.environ.get("PARAVT_SCREENSHOTS", ROOT / ".scratch" / "screenshots")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
