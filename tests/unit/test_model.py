"""Positions, patches and log-probs, each against transformers' own way of computing them."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from paravt.chat import encode_frames
from paravt.config import VisualConfig
from paravt.conversation import Conversation, Visual
from paravt.model import (
    ModelFolderError,
    check_folder,
    collate,
    load_encoder,
    load_model,
    patchify,
    rope_positions,
    sampling_logits,
    save_model,
    token_logprobs,
    token_scores,
    unsampled_ids,
    visual_features,
)
from tests.tiny import (
    VISUAL,
    TinyFrames,
    tiny_conversation,
    tiny_encoder,
    tiny_folder,
    tiny_model,
    tiny_tokenizer,
)

PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
)


def answered(times_s: list[float], seed: int, count: int) -> Conversation:
    """A conversation with `count` sampled tokens and a tool result after them."""
    conversation = tiny_conversation(times_s, seed=seed)
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 300, count).tolist()
    conversation.append_sampled(ids, generator.normal(-2, 0.5, count).tolist())
    tiny_encoder().add_tool_results(conversation, ["A red circle.", TinyFrames([1.0], seed)], "noise.mp4")
    conversation.append_sampled(ids[:3], [-1.0] * len(ids[:3]))
    return conversation


# ---- positions


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)), max_size=5),
    st.integers(0, 6),
)
def test_positions_are_those_of_get_rope_index(frames, tail):
    """Frames of any merged grid, at least one text token before each (a vision-start stands there)."""
    pad = tiny_encoder().image_pad_id
    ids, visuals = [], []
    for rows, columns, text in frames:
        ids += [10] * text + [pad] * (rows * columns)
        visuals.append(Visual("v", 0.0, (1, 2 * rows, 2 * columns)))
    ids += [10] * (tail if ids else tail + 1)

    positions, free = rope_positions(ids, visuals, pad)

    tokens = torch.tensor([ids])
    expected, delta = tiny_model().model.get_rope_index(
        tokens,
        mm_token_type_ids=(tokens == pad).int(),
        image_grid_thw=torch.tensor([v.grid_thw for v in visuals]) if visuals else None,
    )
    assert positions.tolist() == expected[:, 0].tolist()
    assert free == len(ids) + int(delta)  # where transformers continues


def test_positions_by_hand():
    """Two text tokens, a frame of 2 x 3 tokens, one text token: the frame takes max(2, 3) positions."""
    positions, free = rope_positions([5, 5, 9, 9, 9, 9, 9, 9, 5], [Visual("v", 0.0, (1, 4, 6))], 9)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert free == 6


# ---- frames


@pytest.mark.parametrize("size", [(32, 32), (64, 96), (128, 64)])
def test_patches_are_those_of_the_image_processor(size):
    images = list(TinyFrames([0.0, 1.0], seed=3, size=size).images)
    expected = PROCESSOR(images, do_resize=False, return_tensors="pt")
    patches = patchify(images)
    assert patches.dtype == torch.float32
    assert patches.shape == (2 * (size[0] // 16) * (size[1] // 16), 3 * 2 * 16 * 16)
    torch.testing.assert_close(patches, expected["pixel_values"], atol=1e-6, rtol=0)


def test_resized_frames_are_those_of_the_image_processor():
    config = VisualConfig(min_pixels=784, max_pixels=8192)
    frames = TinyFrames([0.0, 2.5], seed=4, size=(90, 160))
    visuals = encode_frames(frames, "a.mp4", config)
    expected = PROCESSOR(
        list(frames.images), size={"shortest_edge": 784, "longest_edge": 8192}, return_tensors="pt"
    )
    assert [v.grid_thw for v in visuals] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    assert [v.time_s for v in visuals] == [0.0, 2.5]
    torch.testing.assert_close(
        patchify([v.image for v in visuals]), expected["pixel_values"], atol=1e-6, rtol=0
    )


def test_a_shared_frame_is_encoded_once(monkeypatch):
    model = tiny_model()
    first = tiny_conversation([0.0, 1.0])
    visuals = [*first.visuals, *first.copy().visuals]
    calls = []
    whole = model.get_image_features

    def counted(pixels, grids, **kwargs):
        calls.append(len(grids))
        return whole(pixels, grids, **kwargs)

    monkeypatch.setattr(model, "get_image_features", counted)
    features = visual_features(model, visuals)["image"]
    assert calls == [2]
    assert len(features.pooler_output) == 4
    assert torch.equal(features.pooler_output[0], features.pooler_output[2])
    assert not torch.equal(features.pooler_output[0], features.pooler_output[1])
    assert [len(level) for level in features.deepstack_features] == [4]


def test_a_frame_read_from_disk_has_no_pixels_and_says_so():
    conversation = Conversation.from_json(tiny_conversation([0.5]).to_json())
    with pytest.raises(ValueError, match=r"frame 0\.500 s of noise\.mp4 has no pixels"):
        visual_features(tiny_model(), conversation.visuals)


# ---- batches and log-probs


def test_collate_pads_on_the_right_with_zeros():
    long, short = answered([0.0, 1.0, 2.0], 1, 6), answered([], 2, 4)
    batch = collate([short, long])
    width = len(long.ids)
    assert batch.input_ids.shape == batch.loss_mask.shape == batch.engine_logprobs.shape == (2, width)
    assert batch.position_ids.shape == (3, 2, width)
    assert batch.attention_mask.sum(1).tolist() == [len(short.ids), width]
    assert batch.input_ids[0, : len(short.ids)].tolist() == short.ids
    assert batch.loss_mask.sum(1).tolist() == [7, 9]
    assert batch.input_ids[0, len(short.ids) :].sum() == 0
    assert len(batch.visuals) == 1 + 4
    torch.testing.assert_close(batch.engine_logprobs[1].tolist(), long.engine_logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_and_entropy_equal_a_plain_forward(temperature):
    """One conversation at a time through the whole model with pixels, without any of our shortcuts."""
    model = tiny_model()
    conversations = [answered([0.0, 1.5], 5, 7), answered([], 6, 3), answered([0.0, 1.0, 4.0], 7, 12)]
    with torch.no_grad():
        logprobs, entropy = token_logprobs(model, collate(conversations), temperature)
        for row, conversation in enumerate(conversations):
            ids = torch.tensor([conversation.ids])
            logits = model(
                input_ids=ids,
                pixel_values=patchify([v.image for v in conversation.visuals]),
                image_grid_thw=torch.tensor([v.grid_thw for v in conversation.visuals]),
                mm_token_type_ids=(ids == conversation.image_pad_id).int(),
            ).logits[0]
            logits[:, unsampled_ids(model)] = -torch.inf
            distribution = torch.distributions.Categorical(logits=logits[:-1] / temperature)
            mask = torch.tensor(conversation.loss_mask[1:], dtype=torch.bool)
            expected = distribution.log_prob(ids[0, 1:]).where(mask, torch.zeros(()))
            length = len(conversation.ids)
            torch.testing.assert_close(logprobs[row, 1:length], expected, atol=2e-5, rtol=0)
            torch.testing.assert_close(
                entropy[row, 1:length],
                distribution.entropy().where(mask, torch.zeros(())),
                atol=2e-5,
                rtol=0,
            )
            assert logprobs[row, 0] == 0 and logprobs[row, length:].abs().sum() == 0


def test_a_longer_neighbour_changes_nothing():
    one, other = answered([0.0], 8, 5), answered([0.0, 1.0, 2.0, 3.0], 9, 20)
    with torch.no_grad():
        alone, _ = token_logprobs(tiny_model(), collate([one]), 0.7)
        beside, _ = token_logprobs(tiny_model(), collate([one, other]), 0.7)
    torch.testing.assert_close(beside[0, : len(one.ids)], alone[0], atol=1e-5, rtol=0)


def test_gradient_reaches_language_and_vision_weights_and_entropy_carries_none():
    model = load_model(tiny_folder())
    logprobs, entropy = token_logprobs(model, collate([answered([0.0, 1.0], 10, 6)]), 1.0)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    for weight in (model.lm_head.weight, model.model.visual.blocks[0].mlp.linear_fc1.weight):
        assert weight.grad is not None and 0 < weight.grad.abs().sum() < torch.inf


def test_control_tokens_of_vision_are_outside_the_support():
    model = tiny_model()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert unsampled_ids(model) == sorted(tiny_tokenizer().convert_tokens_to_ids(names))
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = sampling_logits(model, hidden, 0.5)
        plain = model.lm_head(hidden)
    assert logits.dtype == torch.float32
    assert torch.isneginf(logits[:, unsampled_ids(model)]).all()
    assert torch.isneginf(logits).sum() == 3 * 4
    torch.testing.assert_close(logits[:, 0], plain[:, 0] * 2)
    with torch.no_grad():
        torch.testing.assert_close(sampling_logits(model, hidden, 0.0), sampling_logits(model, hidden, 1.0))


def test_support_ignores_ids_beyond_the_vocabulary():
    config = SimpleNamespace(
        image_token_id=151655,
        video_token_id=3,
        vision_start_token_id=151652,
        vision_end_token_id=2,
        text_config=SimpleNamespace(vocab_size=400),
    )
    assert unsampled_ids(SimpleNamespace(config=config)) == [2, 3]


# ---- folders


def test_a_saved_model_gives_the_same_logprobs(tmp_path):
    model = load_model(tiny_folder())
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
        before, _ = token_logprobs(model, collate([answered([0.0], 11, 5)]), 1.0)
    save_model(model, tiny_folder(), tmp_path / "saved")
    encoder = load_encoder(tmp_path / "saved", VISUAL)
    assert encoder.end_ids == tiny_encoder().end_ids
    with torch.no_grad():
        after, _ = token_logprobs(load_model(tmp_path / "saved"), collate([answered([0.0], 11, 5)]), 1.0)
    assert torch.equal(before, after)


def test_an_incomplete_folder_is_named_with_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"no tokenizer\.json, \*\.safetensors"):
        check_folder(tmp_path)
    with pytest.raises(ModelFolderError):
        load_model(tmp_path)


@pytest.mark.parametrize("at_once", [1, 3 * 400, 7 * 400])
def test_logits_in_parts_change_neither_scores_nor_gradient(monkeypatch, at_once):
    """The vocabulary has 400 tokens: one, three or seven positions at a time."""
    batch = collate([answered([0.0, 1.0], 10, 6), answered([], 11, 9)])

    def scored():
        model = load_model(tiny_folder(), torch.float64)
        scores = token_scores(model, batch, 0.7, entropy_grad=True)
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
        return scores, model.lm_head.weight.grad, model.model.visual.blocks[0].mlp.linear_fc1.weight.grad

    wanted, *wanted_gradients = scored()
    monkeypatch.setattr("paravt.model.LOGITS_AT_ONCE", at_once)
    found, *gradients = scored()
    for name in ("logprobs", "entropy", "top"):
        assert torch.equal(getattr(found, name) != 0, getattr(wanted, name) != 0)
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), atol=1e-12, rtol=0)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
