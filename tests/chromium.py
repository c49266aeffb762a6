"""A real browser for tests: Debian's Chromium through playwright, and where its pictures are kept."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import shutil

import pytest

from stages.params import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium, whose loop keeps this thread; skips with the command that installs it."""
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
    """$PARAVT_SCREENSHOTS, by default .scratch/screenshots."""
    folder = Path(os.environ.get("PARAVT_SCREENSHOTS", ROOT / ".scratch" / "screenshots")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
