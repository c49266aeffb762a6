"""kill -9 in the middle of SFT and of GRPO, then again: the weights of an unbroken run, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
import torch

from tests.training_world import run_pipeline

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60


def start(folder: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.training_world", str(folder)]
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)


def kill_after(folder: Path, stage: str, lines: int, log: Path) -> None:
    """Start the pipeline and kill it as soon as `stage` has written `lines` lines of metrics."""
    process = start(folder, log)
    path = folder / stage / "metrics.jsonl"
    ends = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < ends and process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") >= lines:
                break
            time.sleep(0.002)
        assert process.poll() is None, f"it ended before it could be killed:\n{log.read_text()}"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert path.read_bytes().count(b"\n") >= lines


def finish(folder: Path, log: Path) -> None:
    process = start(folder, log)
    assert process.wait(TIMEOUT_S) == 0, log.read_text()


def weights(folder: Path, model: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "models" / model / "model.safetensors")


@pytest.mark.lifecycle
@pytest.mark.slow
def test_a_killed_run_ends_like_an_unbroken_one(tmp_path):
    unbroken, broken, log = tmp_path / "unbroken", tmp_path / "broken", tmp_path / "log.txt"
    run_pipeline(unbroken)
    kill_after(broken, "sft", 3, log)
    assert not (broken / "models" / "sft").exists()
    kill_after(broken, "grpo", 3, log)
    assert not (broken / "models" / "grpo").exists()
    finish(broken, log)
    for model in ("sft", "grpo"):
        wanted, got = weights(unbroken, model), weights(broken, model)
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        metrics = [(folder / model / "metrics.jsonl").read_bytes() for folder in (unbroken, broken)]
        assert metrics[0] == metrics[1]
    base = weights(unbroken, "base")
    assert any(not torch.equal(base[name], tensor) for name, tensor in weights(broken, "sft").items())

    # All steps are done: running again changes nothing and ends well.
    before = weights(broken, "grpo")
    run_pipeline(broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(broken, "grpo").items())
