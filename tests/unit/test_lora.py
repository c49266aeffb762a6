"""Adapters: only they are trained, the frozen start is the model without them, a written folder has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paravt.checkpoints import latest, load_tensors
from paravt.config import LoRAConfig, OptimiserConfig, TrainConfig
from paravt.export import write_model_folder
from paravt.lora import adapters_off, add_adapters, merged_weights
from paravt.model import Batch, collate, load_model, token_logprobs
from paravt.training import TrainingRun
from tests.tiny import tiny_conversation, tiny_folder

CONFIG = LoRAConfig(rank=4, alpha=8.0)


def batch() -> Batch:
    conversation = tiny_conversation([0.0, 1.0], seed=5)
    conversation.append_sampled(np.random.default_rng(5).integers(0, 300, 9).tolist(), [0.0] * 9)
    return collate([conversation])


def run(scratch, steps: int = 4, dtype=torch.float32) -> TrainingRun:
    return TrainingRun(
        load_model(tiny_folder(), dtype),
        OptimiserConfig(learning_rate=3e-2),
        steps=steps,
        save_every=2,
        keep=2,
        frozen_vision=True,
        scratch_dir=scratch,
        identity="adapters",
        train=TrainConfig(lora=CONFIG),
    )


def do_step(training: TrainingRun, step: int) -> None:
    loss = training.backward(-training.scores(batch(), 1.0).logprobs.sum() / 9)
    training.finish_step(step, training.update(step, loss, ["s"]))


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, batch(), 1.0)[0]


def test_adapters_start_as_nothing_and_follow_from_the_seed():
    plain, one, same, other = (load_model(tiny_folder()) for _ in range(4))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for model, seed in ((one, 1), (same, 1), (other, 2)):
        add_adapters(model, CONFIG, seed)
    assert torch.equal(torch.get_rng_state(), before)  # no other draw is moved
    assert torch.equal(logprobs(one), logprobs(plain))
    drawn = [{n: w for n, w in m.named_parameters() if "lora_A" in n} for m in (one, same, other)]
    assert len(drawn[0]) == 2 * 7  # seven linear layers in each of two blocks
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not any(torch.equal(drawn[0][name], drawn[2][name]) for name in drawn[0])


def test_only_adapters_of_the_language_model_are_trained(tmp_path):
    training = run(tmp_path)
    trained = {name for name, weight in training.model.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name and ".language_model." in name for name in trained)
    before = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    start = logprobs(training.model)
    do_step(training, 0)
    do_step(training, 1)
    moved = {name for name, w in training.model.state_dict().items() if not torch.equal(w, before[name])}
    assert moved == trained
    assert (logprobs(training.model) - start).abs().max() > 0.05
    with adapters_off(training.model):
        assert torch.equal(logprobs(training.model), start)
    scored = training.frozen_start()(batch(), 1.0).logprobs
    assert torch.equal(scored, start) and not scored.requires_grad
    assert {name for name, weight in training.model.named_parameters() if weight.requires_grad} == trained


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_merged_folder_writes_what_the_adapters_write(tmp_path, dtype, within):
    training = run(tmp_path / "scratch", dtype=dtype)
    for step in range(2):
        do_step(training, step)
    write_model_folder(training.model, tiny_folder(), tmp_path / "merged")
    merged = load_model(tmp_path / "merged", dtype)
    assert merged.state_dict().keys() == load_model(tiny_folder()).state_dict().keys()
    torch.testing.assert_close(logprobs(merged), logprobs(training.model), atol=within, rtol=0)
    weights = merged_weights(training.model)
    assert all(torch.equal(weights[name], weight) for name, weight in merged.state_dict().items())


def test_a_run_with_adapters_goes_on_and_saves_only_them(tmp_path):
    whole = run(tmp_path / "whole")
    for step in whole.remaining:
        do_step(whole, step)
    broken = run(tmp_path / "broken")
    for step in range(3):
        do_step(broken, step)
    resumed = run(tmp_path / "broken")
    assert list(resumed.remaining) == [2, 3]
    for step in resumed.remaining:
        do_step(resumed, step)
    assert torch.equal(logprobs(whole.model), logprobs(resumed.model))
    saved = load_tensors(latest(tmp_path / "broken").folder / "state.pt")
    assert saved["model"] and all("lora_" in name for name in saved["model"])
