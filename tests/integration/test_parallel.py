"""Two processes over gloo, weights whole or split, against one: losses, gradients, weights, checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest
from safetensors.torch import load_file
import torch

from paravt import checkpoints
from tests.parallel_world import STEPS, main, resume
from tests.tiny import build_tiny
from tests.training_world import write_clips

ROOT = Path(__file__).parents[2]
LAYOUTS = ("replicated", "fsdp2")
RUNS = ("sft-frozen", "sft-all", "sft-packed", "sft-checkpointing", "grpo-frozen", "grpo-all", "grpo-dealt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def launch(layout: str, folder: Path, name: str, *more: str) -> None:
    """Two processes under accelerate, as a stage starts them."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"conf/accelerate/{layout}.yaml", "--num_processes", "2"]
    command += ["--main_process_port", "0", "-m", "tests.parallel_world", str(folder), name, *more]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    write_clips(folder)
    build_tiny(folder / "base")
    main(folder, "one")
    launch("replicated", folder, "replicated", "one")
    launch("fsdp2", folder, "fsdp2", "one", "replicated")
    resume(folder, "one", *LAYOUTS)
    return folder


def result(folder: Path) -> tuple[list[dict], list[dict], dict]:
    """Metrics, gradients of each step, weights at the end."""
    kept = torch.load(folder / "result.pt", weights_only=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], kept["gradients"], kept["weights"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_compute_what_one_computes(world, layout, name):
    wanted_lines, wanted_gradients, wanted = result(world / "one" / name)
    lines, gradients, weights = result(world / layout / name)
    assert len(lines) == len(gradients) == STEPS
    for line, expected in zip(lines, wanted_lines, strict=True):
        assert line.keys() == expected.keys()
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, abs=1e-6), key
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, atol=1e-6, rtol=0, msg=key)
    assert weights.keys() == wanted.keys()
    for key, weight in wanted.items():
        torch.testing.assert_close(weights[key], weight, atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_frozen_tower_has_no_gradient_and_an_open_one_has_all(world, layout):
    for stage in ("sft", "grpo"):
        _, frozen, _ = result(world / layout / f"{stage}-frozen")
        assert not [name for name in frozen[0] if ".visual." in name]
        _, whole, weights = result(world / layout / f"{stage}-all")
        trained = {name for name in weights if name != "lm_head.weight"}  # tied to the embedding
        assert set(whole[0]) == trained


def test_a_written_folder_is_whole_however_the_weights_lay(world):
    wanted = load_file(world / "one" / "sft-all" / "model" / "model.safetensors")
    for layout in LAYOUTS:
        found = load_file(world / layout / "sft-all" / "model" / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0, msg=name)
        assert (world / layout / "sft-all" / "model" / "tokenizer.json").is_file()


def test_split_weights_are_saved_in_parts_by_each_process(world):
    saved = checkpoints.latest(world / "fsdp2" / "sft-all" / "scratch")
    assert saved.step == STEPS
    parts = {path.name for path in (saved.folder / "shards").glob("*.distcp")}
    assert parts == {"__0_0.distcp", "__1_0.distcp"}
    assert "model" not in checkpoints.load_tensors(saved.folder / "state.pt")


CHANGES = [
    ("one", "replicated"),
    ("one", "fsdp2"),
    ("replicated", "fsdp2"),
    ("fsdp2", "one"),
    ("replicated", "one"),
]


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_run_goes_on_with_other_processes(world, stage, first, then):
    """Two of four steps in the first layout, the others in the second: the weights of an unbroken run."""
    _, _, wanted = result(world / "one" / f"{stage}-frozen")
    lines, gradients, weights = result(world / f"{first}-{then}" / f"{stage}-frozen")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert len(gradients) == STEPS - 2
    for key, weight in wanted.items():
        torch.testing.assert_close(weights[key], weight, atol=1e-6, rtol=0, msg=key)
