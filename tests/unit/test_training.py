"""What both trainers stand on: schedule, micro-batches, resumable state, losses that are not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path
import resource

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from paravt import checkpoints
from paravt.checkpoints import CheckpointError
from paravt.config import OptimiserConfig
from paravt.export import write_model_folder
from paravt.model import load_model
from paravt.training import NonFiniteLoss, TrainingRun, learning_rate, micro_batches
from tests.tiny import tiny_folder


def run(
    scratch: Path, steps: int = 4, save_every: int = 2, identity: object = "a", harm=lambda model: None
) -> TrainingRun:
    model = load_model(tiny_folder())
    harm(model)
    return TrainingRun(
        model,
        OptimiserConfig(learning_rate=1e-2),
        steps=steps,
        save_every=save_every,
        keep=2,
        frozen_vision=False,
        scratch_dir=scratch,
        identity=identity,
    )


def do_step(training: TrainingRun, step: int, scale: float = 1.0) -> dict:
    """One update on a loss that moves every weight of the head."""
    weight = training.model.lm_head.weight
    loss = training.backward((weight * scale).square().mean())
    return training.finish_step(step, training.update(step, loss, [f"s{step}a", f"s{step}b"]))


def head(training: TrainingRun) -> torch.Tensor:
    return training.model.lm_head.weight.detach().clone()


def test_constant_and_cosine_rates_by_hand():
    constant = OptimiserConfig(learning_rate=0.1, warmup_share=0.2)
    assert [learning_rate(constant, step, 10) for step in range(4)] == [0.05, 0.1, 0.1, 0.1]
    cosine = OptimiserConfig(learning_rate=0.1, schedule="cosine", warmup_share=0.2)
    got = [learning_rate(cosine, step, 10) for step in (0, 1, 2, 6, 9)]
    wanted = [0.05, 0.1, 0.1, 0.05, 0.05 * (1 + math.cos(math.pi * 7 / 8))]
    assert got == pytest.approx(wanted)
    assert learning_rate(OptimiserConfig(learning_rate=0.1), 0, 10) == 0.1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_micro_batches_by_hand():
    assert micro_batches([5, 3, 9, 3, 20], 10) == [[1, 3], [0], [2], [4]]
    assert micro_batches([], 10) == []


def test_a_run_goes_on_from_its_last_checkpoint_bit_for_bit(tmp_path):
    whole = run(tmp_path / "whole")
    for step in whole.remaining:
        do_step(whole, step)
    broken = run(tmp_path / "broken")
    broken.count("failed", 3)
    for step in range(3):
        do_step(broken, step)  # saved after 2, "killed" after 3
    resumed = run(tmp_path / "broken")
    assert (resumed.done, list(resumed.remaining), resumed.counts) == (2, [2, 3], {"failed": 3})
    for step in resumed.remaining:
        do_step(resumed, step)
    assert torch.equal(head(whole), head(resumed))
    assert whole.metrics_path.read_bytes() == resumed.metrics_path.read_bytes()
    assert [json.loads(line)["step"] for line in resumed.lines] == [1, 2, 3, 4]


def test_a_finished_run_has_nothing_left_and_says_the_same(tmp_path):
    first = run(tmp_path)
    for step in first.remaining:
        do_step(first, step)
    again = run(tmp_path)
    assert list(again.remaining) == []
    assert again.result() == first.result()
    assert torch.equal(head(first), head(again))


def test_a_value_that_is_not_finite_is_left_out_of_the_line_and_counted(tmp_path, caplog):
    training = run(tmp_path)
    kept = training.finish_step(0, {"loss": 1.5, "entropy": float("nan"), "ref_kl": None})
    assert kept == {"loss": 1.5} and json.loads(training.lines[-1]) == {"step": 1, "loss": 1.5}
    assert training.counts == {"not finite: entropy": 1}
    assert "step 1: entropy is nan" in caplog.text


def test_a_run_that_ends_early_is_an_error(tmp_path):
    training = run(tmp_path)
    do_step(training, 0)
    with pytest.raises(RuntimeError, match="after 1 of 4 steps"):
        training.result()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    training = run(tmp_path)
    for step in range(2):
        do_step(training, step)
    with pytest.raises(CheckpointError, match="other parameters or data"):
        run(tmp_path, identity="b")
    with pytest.raises(CheckpointError, match="other parameters or data"):
        run(tmp_path, steps=1)


def test_a_checkpoint_of_another_start_is_refused(tmp_path):
    do_step(run(tmp_path, save_every=1), 0)
    assert run(tmp_path).done == 1
    with pytest.raises(CheckpointError, match="other parameters or data"):
        run(tmp_path, harm=lambda model: torch.nn.init.zeros_(model.lm_head.weight))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_and_the_third_ends_the_run(tmp_path, bad):
    training = run(tmp_path, steps=9)
    do_step(training, 0)
    before = head(training)
    kept = do_step(training, 1, bad)
    assert "loss" not in kept and kept["non_finite_steps"] == 1
    assert torch.equal(head(training), before)
    do_step(training, 2)
    assert not torch.equal(head(training), before)
    do_step(training, 3, bad)
    resumed = run(tmp_path, steps=9)  # the run of bad steps goes on where it stood
    assert (resumed.non_finite, resumed.non_finite_in_a_row) == (2, 1)
    do_step(resumed, 4, bad)
    with pytest.raises(NonFiniteLoss, match="3 steps in a row; the last was step 6, samples s5a, s5b"):
        do_step(resumed, 5, bad)
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)


def test_a_disk_that_does_not_take_the_checkpoint_keeps_the_one_before(tmp_path):
    training = run(tmp_path, save_every=1)
    do_step(training, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CheckpointError, match="step 2 .* the one of step 1 is kept"):
            do_step(training, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.latest(tmp_path).step == 1
    resumed = run(tmp_path, save_every=1)
    assert resumed.done == 1
    do_step(resumed, 1)


def test_a_model_folder_is_written_whole(tmp_path):
    model = load_model(tiny_folder())
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    write_model_folder(model, tiny_folder(), tmp_path / "out" / "model")
    again = load_model(tmp_path / "out" / "model")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CheckpointError, match="cannot write .*second: File too large"):
            write_model_folder(model, tiny_folder(), tmp_path / "out" / "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
