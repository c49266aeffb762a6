"""Rows of several samples: which go together, and that sharing a row changes no number."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from paravt.conversation import Conversation
from paravt.model import Batch, collate, load_model, pack, token_scores
from paravt.segments import use_segments
from paravt.sft.packing import best_fit
from tests.tiny import TinyFrames, tiny_conversation, tiny_encoder, tiny_folder


def answered(times_s: list[float], seed: int, count: int, size: tuple[int, int] = (32, 32)) -> Conversation:
    """A conversation with `count` sampled tokens, a tool result with a frame, and three more."""
    conversation = tiny_conversation(times_s, seed=seed, size=size)
    generator = np.random.default_rng(seed)
    conversation.append_sampled(generator.integers(0, 300, count).tolist(), [-1.0] * count)
    tiny_encoder().add_tool_results(conversation, ["A red circle.", TinyFrames([1.0], seed)], "noise.mp4")
    conversation.append_sampled(generator.integers(0, 300, 3).tolist(), [-1.0] * 3)
    return conversation


SAMPLES = [answered([0.0, 1.5], 1, 7, (32, 64)), answered([], 2, 3), answered([0.0, 1.0, 4.0], 3, 12)]


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 80))
def test_each_sample_that_fits_is_in_one_row_and_no_row_overflows(lengths, capacity):
    rows = best_fit(lengths, capacity)
    packed = sorted(position for row in rows for position in row)
    assert packed == [i for i, length in enumerate(lengths) if length <= capacity]
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert all(tokens <= capacity for tokens in filled)
    # at most one row is half empty: two such would have been one
    assert sum(2 * tokens <= capacity for tokens in filled) <= 1


def test_the_fullest_row_with_room_is_taken():
    assert best_fit([5, 4, 6, 3, 2], 10) == [[2, 1], [0, 3, 4]]
    assert best_fit([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]
    assert best_fit([11, 10], 10) == [[1]]
    assert best_fit([4, 4, 4], 8) == [[0, 1], [2]]


def losses(model, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over the tokens that count, and its gradient by name."""
    model.zero_grad()
    loss = -token_scores(model, batch, 1.0).logprobs.sum() / batch.loss_mask.sum()
    loss.backward()
    return loss.detach(), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("attention", ["mask", "segments", "eager"])
def test_a_packed_row_has_loss_and_gradient_of_padded_samples(attention):
    model = load_model(tiny_folder(), torch.float64)
    wanted, wanted_gradients = losses(model, collate(SAMPLES))
    if attention == "segments":
        use_segments(model)
    elif attention == "eager":
        model.set_attn_implementation("eager")
    loss, gradients = losses(model, pack(SAMPLES))
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=0, msg=name)


def test_without_borders_the_samples_would_see_each_other():
    """The check above can fail: as one long conversation the same tokens have another loss."""
    model = load_model(tiny_folder(), torch.float64)
    packed = pack(SAMPLES)
    merged = replace(
        packed,
        position_ids=packed.position_ids[1:],
        attention_mask=torch.ones_like(packed.input_ids),
        segments=None,
    )
    apart = token_scores(model, packed, 1.0).logprobs
    together = token_scores(model, merged, 1.0).logprobs
    first = len(SAMPLES[0].ids)
    torch.testing.assert_close(together[:, :first], apart[:, :first], atol=1e-9, rtol=0)
    assert (together[:, first:] - apart[:, first:]).abs().max() > 0.1


@pytest.mark.parametrize("by_segments", [False, True])
def test_changing_one_sample_changes_no_other(by_segments):
    model = load_model(tiny_folder(), torch.float64)
    if by_segments:
        use_segments(model)
    before = token_scores(model, pack(SAMPLES), 1.0).logprobs
    changed = [answered([0.0, 1.5], 99, 7, (32, 64)), *SAMPLES[1:]]
    after = token_scores(model, pack(changed), 1.0).logprobs
    first = len(SAMPLES[0].ids)
    assert len(changed[0].ids) == first
    assert torch.equal(before[:, first:], after[:, first:])
    assert not torch.equal(before[:, :first], after[:, :first])


def test_a_packed_row_keeps_positions_frames_and_masks():
    batch = pack(SAMPLES)
    lengths = [len(sample.ids) for sample in SAMPLES]
    assert batch.segments == tuple(lengths) and batch.input_ids.shape == (1, sum(lengths))
    assert batch.input_ids[0].tolist() == [token for sample in SAMPLES for token in sample.ids]
    assert batch.loss_mask.sum() == sum(sample.sampled_count for sample in SAMPLES)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    assert batch.position_ids[:, 0, starts].abs().sum() == 0
    alone = collate(SAMPLES)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        here = batch.position_ids[1:, 0, start : start + length]
        assert torch.equal(here, alone.position_ids[:, row, :length])
    assert batch.visuals == alone.visuals
