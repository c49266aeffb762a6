"""The transformers engine: draws belong to requests, log-probs to the trainer's own distribution."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from paravt.conversation import Conversation
from paravt.engines import EngineError, Generation, Request, Sampling, TransformersEngine
from paravt.engines.transformers import KEEP_SHARE, inverse_cdf
from paravt.model import (
    collate,
    load_model,
    patchify,
    rope_positions,
    sampling_logits,
    save_model,
    token_logprobs,
    unsampled_ids,
)
from tests.tiny import tiny_conversation, tiny_encoder, tiny_folder, tiny_model


def engine(**options) -> TransformersEngine:
    return TransformersEngine(tiny_model(), tiny_encoder().end_ids, **options)


def ask(conversation: Conversation, **sampling) -> Request:
    options = {"temperature": 1.0, "max_new_tokens": 12} | sampling
    return Request(tuple(conversation.ids), tuple(conversation.visuals), Sampling(**options))


def prompts() -> list[Conversation]:
    """Prompts of quite different lengths, with and without frames, one with large frames."""
    return [
        tiny_conversation([0.0, 1.0, 2.0], seed=1),
        tiny_conversation([], text="What?", seed=2),
        tiny_conversation([0.0, 7.5], text="When does the circle show in the red part? " * 4, seed=3),
        tiny_conversation([3.0], seed=4, size=(64, 96)),
    ]


def same(first: Generation, second: Generation, tolerance: float = 1e-4) -> None:
    assert first.ids == second.ids
    assert first.finish_reason == second.finish_reason
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=tolerance)


def test_greedy_equals_a_whole_forward_a_token():
    """The reference knows no cache, no padding and no batch: everything is recomputed for each token."""
    model, conversations = tiny_model(), prompts()
    requests = [ask(c, temperature=0.0, max_new_tokens=10) for c in conversations]
    answers = engine().generate(requests)
    for conversation, [generation] in zip(conversations, answers, strict=True):
        ids = list(conversation.ids)
        for token, logprob in zip(generation.ids, generation.logprobs, strict=True):
            tokens = torch.tensor([ids])
            positions, _ = rope_positions(ids, conversation.visuals, conversation.image_pad_id)
            pixels = {}
            if conversation.visuals:
                pixels = {
                    "pixel_values": patchify([v.image for v in conversation.visuals]),
                    "image_grid_thw": torch.tensor([v.grid_thw for v in conversation.visuals]),
                }
            with torch.no_grad():
                hidden = model.model(
                    input_ids=tokens, position_ids=torch.from_numpy(positions)[:, None], **pixels
                )[0]
                scores = sampling_logits(model, hidden[0, -1], 0.0).log_softmax(-1)
            assert token == int(scores.argmax())
            assert logprob == pytest.approx(float(scores.max()), abs=1e-4)
            ids.append(token)
        assert generation.ids[-1] in tiny_encoder().end_ids or len(generation.ids) == 10


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_batched_equals_alone(temperature):
    requests = [
        ask(c, temperature=temperature, seed=i, n=2, max_new_tokens=15 + i) for i, c in enumerate(prompts())
    ]
    together = engine().generate(requests)
    for request, pair in zip(requests, together, strict=True):
        [alone] = engine().generate([request])
        assert len(pair) == 2
        for first, second in zip(pair, alone, strict=True):
            same(first, second)


@pytest.mark.parametrize("budget", [1, 150, 400, 10_000])
def test_the_token_budget_changes_no_token(budget):
    requests = [ask(c, seed=i, n=3) for i, c in enumerate(prompts())]
    wanted = engine().generate(requests)
    for first, second in zip(wanted, engine(max_batch_tokens=budget).generate(requests), strict=True):
        for one, other in zip(first, second, strict=True):
            same(one, other)


def test_a_draw_depends_on_seed_and_sample_index_alone():
    conversation = prompts()[0]
    [eight] = engine().generate([ask(conversation, seed=5, n=8)])
    [three] = engine().generate([ask(conversation, seed=5, n=3)])
    again, other = engine().generate([ask(conversation, seed=5, n=3), ask(conversation, seed=6, n=3)])
    for first, second, third in zip(eight, three, again, strict=False):
        same(first, second)
        same(first, third)
    assert len({tuple(g.ids) for g in eight}) > 4
    assert [g.ids for g in again] != [g.ids for g in other]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_the_trainers(temperature):
    conversations = [c.copy() for c in prompts() for _ in range(2)]
    options = {"temperature": temperature, "max_new_tokens": 20}
    requests = [ask(c, seed=i, **options) for i, c in enumerate(conversations)]
    for conversation, [generation] in zip(conversations, engine().generate(requests), strict=True):
        conversation.append_sampled(generation.ids, generation.logprobs)
    batch = collate(conversations)
    with torch.no_grad():
        recomputed, _ = token_logprobs(tiny_model(), batch, temperature)
    assert batch.loss_mask.sum() == sum(c.sampled_count for c in conversations) > 50
    torch.testing.assert_close(batch.engine_logprobs, recomputed, atol=1e-4, rtol=0)


def test_tokens_follow_the_distribution():
    """2000 first tokens of one prompt against their probabilities (total variation), at temperature 0.7."""
    conversation = prompts()[1]
    [generations] = engine().generate([ask(conversation, temperature=0.7, n=2000, max_new_tokens=1)])
    counts = np.bincount([g.ids[0] for g in generations], minlength=400) / 2000
    positions, _ = rope_positions(conversation.ids, [], conversation.image_pad_id)
    with torch.no_grad():
        hidden = tiny_model().model(
            input_ids=torch.tensor([conversation.ids]), position_ids=torch.from_numpy(positions)[:, None]
        )[0]
        expected = sampling_logits(tiny_model(), hidden[0, -1], 0.7).softmax(-1).numpy()
    # 400 tokens and 2000 draws: chance alone gives about sum(sqrt(p / (2 pi 2000)))
    chance = np.sqrt(expected * (1 - expected) / (2 * np.pi * 2000)).sum()
    assert np.abs(counts - expected).sum() / 2 < 1.5 * chance
    assert counts[unsampled_ids(tiny_model())].sum() == 0


def biased_towards_end(strength: float) -> TransformersEngine:
    """An engine whose model likes to end its turn: the end token's embedding points where the output does."""
    model = load_model(tiny_folder())
    with torch.no_grad():
        model.model.language_model.norm.weight.mul_(0.2)
        head = torch.nn.Linear(32, 400, bias=True)
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[tiny_encoder().end_id] = strength
        model.lm_head = head
    return TransformersEngine(model, tiny_encoder().end_ids)


def test_rows_that_end_leave_and_the_others_go_on():
    """Ends fall at different steps, so that the batch is gathered anew more than once."""
    biased = biased_towards_end(3.5)
    requests = [ask(c, seed=i, n=6, max_new_tokens=60) for i, c in enumerate(prompts())]
    answers = biased.generate(requests)
    flat = [g for group in answers for g in group]
    ends = tiny_encoder().end_ids
    assert len({len(g.ids) for g in flat}) > 8
    assert sum(g.finish_reason == "stop" for g in flat) > (1 - KEEP_SHARE) * len(flat)
    for generation in flat:
        assert len(generation.ids) == len(generation.logprobs)
        assert not ends & set(generation.ids[:-1])
        assert (generation.finish_reason == "stop") == (generation.ids[-1] in ends)
        assert generation.finish_reason == "stop" or len(generation.ids) == 60
    for request, group in zip(requests, answers, strict=True):
        for first, second in zip(group, biased.generate([request])[0], strict=True):
            same(first, second)


def test_each_row_has_its_own_limit_and_the_limit_is_not_a_stop():
    conversation = prompts()[0]
    short, long = engine().generate(
        [ask(conversation, seed=1, max_new_tokens=3), ask(conversation, seed=1, max_new_tokens=300)]
    )
    assert short[0].finish_reason == "length" and len(short[0].ids) == 3
    assert long[0].ids[:3] == short[0].ids
    assert len(long[0].ids) > 150  # past the first growth of the buffers
    extended = conversation.copy()
    extended.append_sampled(long[0].ids, long[0].logprobs)
    with torch.no_grad():
        recomputed, _ = token_logprobs(tiny_model(), collate([extended]), 1.0)
    np.testing.assert_allclose(recomputed[0, len(conversation.ids) :], long[0].logprobs, atol=1e-4)


def test_an_end_token_at_the_limit_is_a_stop():
    biased = biased_towards_end(30.0)
    [[generation]] = biased.generate([ask(prompts()[0], max_new_tokens=1)])
    assert generation.ids == [tiny_encoder().end_id]
    assert generation.finish_reason == "stop"


def test_a_prompt_is_encoded_and_prefilled_once(monkeypatch):
    model, seen = tiny_model(), {"frames": 0, "prefill": []}
    encode, forward = model.get_image_features, model.model.forward

    def counted_encode(pixels, grids, **options):
        seen["frames"] += len(grids)
        return encode(pixels, grids, **options)

    def counted_forward(**options):
        seen["prefill"].append(tuple(options["input_ids"].shape))
        return forward(**options)

    monkeypatch.setattr(model, "get_image_features", counted_encode)
    monkeypatch.setattr(model.model, "forward", counted_forward)
    conversation = prompts()[0]
    answers = engine().generate([ask(conversation, n=8), ask(conversation, n=2, seed=9)])
    assert [len(group) for group in answers] == [8, 2]
    assert seen == {"frames": 3, "prefill": [(1, len(conversation.ids))]}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 3), min_size=2, max_size=12), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_picks_the_token_whose_interval_holds_the_uniform(logits, uniform):
    logprobs = torch.tensor([[*logits, -torch.inf]]).log_softmax(-1)
    token = int(inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)))
    probabilities = logprobs[0].double().exp().numpy()
    edges = np.concatenate([[0.0], np.cumsum(probabilities / probabilities.sum())])
    assert probabilities[token] > 0
    assert edges[token] - 1e-9 <= uniform <= edges[token + 1] + 1e-9


def test_extreme_uniforms_never_pick_a_token_outside_the_support():
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": ()}, "no prompt tokens"),
        ({"visuals": ()}, "3 image pads stand in its tokens, but its frames need 0"),
        ({"ids": (1, 999)}, r"outside the vocabulary|image pads"),
        ({"sampling": Sampling(1.0, 0)}, "max_new_tokens"),
        ({"sampling": Sampling(1.0, 5, n=0)}, "at least 1"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(change, words):
    good = ask(prompts()[0])
    bad = Request(**(vars(good) | change))
    with pytest.raises(EngineError, match=words) as caught:
        engine().generate([good, bad])
    assert caught.value.request == 1 and "request 1" in str(caught.value)


def test_a_full_context_is_refused_and_a_nearly_full_one_is_cut():
    long = Conversation(tiny_encoder().image_pad_id)
    long.append_prompt([10] * 4095)
    [[generation]] = engine().generate([ask(long, max_new_tokens=50)])
    assert len(generation.ids) == 1
    long.append_prompt([10])
    with pytest.raises(EngineError, match="4096 tokens fill the context of 4096"):
        engine().generate([ask(long)])


def test_new_weights_change_the_answers_and_their_version(tmp_path):
    changed = load_model(tiny_folder())
    with torch.no_grad():
        changed.model.language_model.layers[0].mlp.down_proj.weight.mul_(-1)
    save_model(changed, tiny_folder(), tmp_path)
    subject = TransformersEngine(load_model(tiny_folder()), tiny_encoder().end_ids)
    request = ask(prompts()[0], temperature=0.0)
    [[before]] = subject.generate([request])
    subject.load_weights(str(tmp_path), version=3)
    [[after]] = subject.generate([request])
    assert (before.weight_version, after.weight_version) == (0, 3)
    same(after, TransformersEngine(changed, tiny_encoder().end_ids).generate([request])[0][0])
    assert before.ids != after.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_give_no_numbers_are_named(temperature, bad):
    model = load_model(tiny_folder())
    with torch.no_grad():
        model.lm_head.weight[7] = bad  # one token of the vocabulary
    subject = TransformersEngine(model, tiny_encoder().end_ids, weight_version=12)
    with pytest.raises(EngineError, match="the weights of version 12 give logits that are not finite"):
        subject.generate([ask(prompts()[1], temperature=temperature, n=1)])


def test_a_training_model_is_left_in_training_mode_and_without_gradients():
    model = load_model(tiny_folder())
    model.gradient_checkpointing_enable()
    model.train()
    [[generation]] = TransformersEngine(model, tiny_encoder().end_ids).generate([ask(prompts()[0], seed=2)])
    assert model.training
    same(generation, engine().generate([ask(prompts()[0], seed=2)])[0][0])
    conversation = prompts()[0]
    conversation.append_sampled(generation.ids, generation.logprobs)
    token_logprobs(model, collate([conversation]), 1.0)[0].sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_the_async_form_gives_the_same_and_calls_may_overlap():
    requests = [ask(c, seed=i) for i, c in enumerate(prompts())]

    async def both(subject):
        halves = requests[:2], requests[2:]
        return await asyncio.gather(*(subject.generate_async(half) for half in halves))

    first, second = asyncio.run(both(engine()))
    for one, other in zip(first + second, engine().generate(requests), strict=True):
        same(one[0], other[0])


def test_nothing_asked_gives_nothing():
    assert engine().generate([]) == []
