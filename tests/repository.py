"""A copy of this repository in another folder, as a fresh clone would be, for tests that run the pipeline."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys

from stages.params import ROOT, check, compose, dump

# of the root dvc.yaml, in its order
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


def copy_repository(target: Path, overrides: list[str]) -> Path:
    """Copy what git tracks or would track, write params.yaml from `overrides`, commit. No outputs, no cache,
    no results of the study.

    Without models/tiny-base a random model of its kind takes its place.
    """
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for name in filter(None, listed.split("\0")):
        made = Path(name).name == "dvc.lock" or name.startswith(("study/results/", "study/report/"))
        if (ROOT / name).is_file() and not made:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    data = compose(overrides)
    check(data)
    (target / "params.yaml").write_text(dump(data), encoding="utf-8")
    if not (target / data["base_model"]).exists():
        from tests.tiny import tiny_folder

        shutil.copytree(tiny_folder(), target / data["base_model"])
    git(target, "init", "-q", "-b", "main")
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "copy")
    return target


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command that runs in the copy, on its code, with a store of its own."""
    env = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "DVC_STAGE")}
    return env | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": str(folder),
        "PREFECT_HOME": str(folder / ".prefect"),
        "OMP_NUM_THREADS": "1",
    }
