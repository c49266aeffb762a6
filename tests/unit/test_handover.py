"""Weights on their way to an engine: what is kept in memory is what a folder would hold, for any training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accelerate.state import AcceleratorState
import pytest
import torch

from paravt.config import LoRAConfig, OptimiserConfig, TrainConfig
from paravt.engines.tied import with_head
from paravt.engines.weight_transfer import read_tensors
from paravt.grpo.handover import Handover
from paravt.model import load_model
from paravt.training import TrainingRun
from tests.tiny import tiny_encoder, tiny_folder


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    """accelerate keeps the first precision that a process asks for."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Taker:
    """Keeps what it is given; one that takes tensors is never given a folder."""

    def __init__(self, takes_tensors: bool) -> None:
        self.takes_tensors = takes_tensors
        self.given: dict[int, dict[str, torch.Tensor]] = {}

    def load_tensors(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        assert self.takes_tensors
        self.given[version] = tensors

    def load_weights(self, folder: str, version: int) -> None:
        assert not self.takes_tensors
        self.given[version] = read_tensors(with_head(folder, Path(folder).parent / f"aside-{version}"))


def training(scratch: Path, train: TrainConfig) -> TrainingRun:
    run = TrainingRun(
        load_model(tiny_folder(), getattr(torch, train.dtype)),
        OptimiserConfig(learning_rate=1e-2),
        steps=2,
        save_every=2,
        keep=2,
        frozen_vision=True,
        scratch_dir=scratch,
        identity="handover",
        train=train,
    )
    with torch.no_grad():
        for name, weight in run.model.named_parameters():
            if "lora_B" in name:  # else they add nothing
                weight.fill_(0.01)
    return run


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4, alpha=8.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_holds_what_a_folder_would(tmp_path, dtype, lora):
    run = training(tmp_path, TrainConfig(dtype=dtype, lora=lora))
    found = {}
    for in_memory in (False, True):
        taker = Taker(in_memory)
        handover = Handover(run, taker, tiny_encoder().tokenizer)
        handover.put(1)
        handover.give(1)
        found[in_memory] = taker.given[1]
    assert found[True].keys() == found[False].keys()
    plain = load_model(tiny_folder()).state_dict()
    assert found[True].keys() == plain.keys()  # no adapter, and the head
    for name, tensor in found[True].items():
        assert tensor.dtype == getattr(torch, dtype) and tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, found[False][name], rtol=0, atol=0)
    largest = max((tensor.float() - plain[name]).abs().max() for name, tensor in found[True].items())
    assert (largest > 1e-2) == (lora is not None)


def test_it_keeps_a_copy_until_every_engine_has_a_later_one(tmp_path):
    run = training(tmp_path, TrainConfig())
    taker = Taker(takes_tensors=True)
    handover = Handover(run, taker, tiny_encoder().tokenizer)
    name = "model.language_model.norm.weight"
    for version in (0, 1, 2):
        with torch.no_grad():
            run.model.get_parameter(name).fill_(float(version))
        handover.put(version)
    handover.forget_before([None])
    handover.give(0)
    handover.forget_before([1])
    with pytest.raises(KeyError):
        handover.give(0)
    handover.give(1)
    handover.give(2)
    assert [taker.given[version][name].unique().item() for version in (0, 1, 2)] == [0.0, 1.0, 2.0]
    assert not (tmp_path / "engine-weights").exists()
