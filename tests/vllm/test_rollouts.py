"""A real vLLM server against the transformers engine: one distribution, the same episodes and weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paravt.agent import run_episodes
from paravt.conversation import Conversation
from paravt.engines import EngineError, Request, Sampling, TransformersEngine
from paravt.engines.factory import make_engine
from paravt.engines.served import transfer_group
from paravt.model import (
    collate,
    load_model,
    rope_positions,
    sampling_logits,
    save_model,
    token_logprobs,
    unsampled_ids,
)
from tests.tiny import TinyFrames
from tests.vllm.conftest import BASE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CLOSE = 1e-3  # of log-probs; measured on two cores: 1.4e-5


@pytest.fixture(scope="module")
def model():
    return load_model(BASE)


def gap(model, conversations: list[Conversation], temperature: float) -> tuple[float, float]:
    """The largest difference of trainer and engine log-probs, and the mean ratio of probabilities."""
    batch = collate(conversations)
    with torch.no_grad():
        trainer, _ = token_logprobs(model, batch, temperature)
    difference = (trainer - batch.engine_logprobs)[batch.loss_mask.bool()]
    return difference.abs().max().item(), difference.exp().mean().item()


def said(rollouts: list) -> list[Conversation]:
    return [conversation for r in rollouts for conversation in (r.main, *r.subagents)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_of_episodes_are_the_trainers(engine, model, samples, agent, temperature):
    rollouts = run_episodes(engine, samples, agent(temperature))
    assert [r.error for r in rollouts if r.stop_reason == "failed"] == []
    assert sum(len(r.subagents) for r in rollouts) >= 4  # the tool was used, and its reports count too
    difference, ratio = gap(model, said(rollouts), temperature)
    print(f"temperature {temperature}: max difference {difference:.2e}, mean ratio {ratio:.6f}")
    assert difference < CLOSE
    assert ratio == pytest.approx(1, abs=0.02)
    assert {version for r in rollouts for version in r.weight_versions} == {0}
    assert not engine.counts


def test_greedy_episodes_are_those_of_the_transformers_engine(engine, model, encoder, samples, agent):
    ours = run_episodes(TransformersEngine(model, encoder.end_ids), samples, agent(0.0, group_size=1))
    theirs = run_episodes(engine, samples, agent(0.0, group_size=1))
    assert [r.answer for r in ours] == [r.answer for r in theirs]
    same = sum(a.main.ids == b.main.ids for a, b in zip(ours, theirs, strict=True))
    assert same >= len(samples) - 1  # a tie may break the other way


def test_a_draw_belongs_to_its_seed(engine, samples, agent):
    first, again = (run_episodes(engine, samples[:4], agent(1.0)) for _ in range(2))
    other = run_episodes(engine, samples[:4], agent(1.0, seed=2))
    alone = run_episodes(engine, samples[:1], agent(1.0))
    assert [r.main.ids for r in first] == [r.main.ids for r in again]
    assert [r.main.ids for r in first[:2]] == [r.main.ids for r in alone]
    assert first[0].main.ids != first[1].main.ids
    assert [r.main.ids for r in first] != [r.main.ids for r in other]


def request(encoder, size: tuple[int, int], **sampling) -> tuple[Request, Conversation]:
    frames = TinyFrames([0.0, 2.5, 7.0], seed=3, size=size)
    conversation = encoder.start(None, frames, "noise.mp4", "Describe the segment.", "<think>\n")
    options = {"temperature": 1.0, "max_new_tokens": 24, "seed": 5} | sampling
    return Request(tuple(conversation.ids), tuple(conversation.visuals), Sampling(**options)), conversation


@pytest.mark.parametrize("size", [(32, 32), (32, 96), (64, 64), (37, 51), (180, 320)])
def test_frames_of_any_shape_reach_the_model_as_they_are(engine, model, encoder, size):
    asked, prompt = request(encoder, size, n=3)
    [generations] = engine.generate([asked])
    conversations = [prompt.copy() for _ in generations]
    for conversation, generation in zip(conversations, generations, strict=True):
        conversation.append_sampled(generation.ids, generation.logprobs)
    assert gap(model, conversations, 1.0)[0] < CLOSE


def test_tokens_follow_the_distribution(engine, model, encoder):
    """1024 first tokens of one prompt against their probabilities (total variation), at temperature 0.7."""
    asked, prompt = request(encoder, (32, 32))
    requests = [Request(asked.ids, asked.visuals, Sampling(0.7, 1, seed=1000 * i, n=32)) for i in range(32)]
    drawn = [g.ids[0] for group in engine.generate(requests) for g in group]
    counts = np.bincount(drawn, minlength=model.config.text_config.vocab_size) / len(drawn)
    batch = collate([prompt])
    positions, _ = rope_positions(prompt.ids, prompt.visuals, prompt.image_pad_id)
    with torch.no_grad():
        from paravt.model import visual_features

        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=torch.from_numpy(positions)[:, None],
            mm_encoder_outputs=visual_features(model, batch.visuals),
        )[0]
        expected = sampling_logits(model, hidden[0, -1], 0.7).softmax(-1).numpy()
    chance = np.sqrt(expected * (1 - expected) / (2 * np.pi * len(drawn))).sum()
    assert np.abs(counts - expected).sum() / 2 < 1.5 * chance + 0.01
    assert counts[unsampled_ids(model)].sum() == 0


def test_new_weights_change_the_answers_and_their_version(engine, encoder, samples, agent, tmp_path):
    before = run_episodes(engine, samples, agent(1.0))
    changed = load_model(BASE)
    with torch.no_grad():
        changed.model.language_model.layers[1].mlp.down_proj.weight.mul_(0.8)
        changed.model.language_model.embed_tokens.weight.mul_(1.05)  # tied to the head
        changed.model.visual.merger.linear_fc2.weight.mul_(1.1)  # the vision tower's own cache goes too
    save_model(changed, BASE, tmp_path)
    engine.load_weights(str(tmp_path), 7)
    after = run_episodes(engine, samples, agent(1.0))
    assert {version for r in after for version in r.weight_versions} == {7}
    assert [r.main.ids for r in before] != [r.main.ids for r in after]
    assert gap(changed, said(after), 1.0)[0] < CLOSE
    assert gap(load_model(BASE), said(after), 1.0)[0] > 10 * CLOSE
    engine.load_weights(str(BASE), 8)
    back = run_episodes(engine, samples, agent(1.0))
    assert [r.main.ids for r in back] == [r.main.ids for r in before]


def breaking_once(number: int):
    """A broadcast that fails at its call of that number, and never again."""
    real, calls = transfer_group.broadcast, []

    def broadcast(group, tensor) -> None:
        calls.append(tensor)
        if len(calls) == number:
            raise RuntimeError("the cable is cut")
        real(group, tensor)

    return broadcast


def test_weights_that_are_sent_are_those_that_are_read_from_the_disk(
    engine, named, params, encoder, limits, samples, agent, tmp_path, monkeypatch
):
    """The same server over a group of processes; the disk is not used, and log-probs are the trainer's. A
    transfer that breaks in the middle is made again, and leaves nothing behind.
    """
    changed = load_model(BASE)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.02)
    config = params.engine.model_copy(update={"weight_transfer": "gloo"})
    with make_engine(config, BASE, encoder, limits, log_folder=tmp_path) as sending:
        before = run_episodes(sending, samples, agent(1.0))
        assert gap(load_model(BASE), said(before), 1.0)[0] < CLOSE
        sending.load_tensors(changed.state_dict(), 5)
        sent = run_episodes(sending, samples, agent(1.0))
        assert {version for r in sent for version in r.weight_versions} == {5}
        assert gap(changed, said(sent), 1.0)[0] < CLOSE
        assert gap(load_model(BASE), said(sent), 1.0)[0] > 10 * CLOSE
        with pytest.raises(EngineError, match="model.nowhere .* is not among those"):
            sending.load_tensors(changed.state_dict() | {"model.nowhere": torch.zeros(3)}, 6)
        assert not sending.counts
        monkeypatch.setattr(transfer_group, "broadcast", breaking_once(40))
        sending.load_tensors(changed.state_dict(), 7)
        assert sending.counts == {"weights: transfer broken": 1}
        again = run_episodes(sending, samples, agent(1.0))
        assert [r.main.ids for r in again] == [r.main.ids for r in sent]
    save_model(changed, BASE, tmp_path / "saved")
    engine.load_weights(str(tmp_path / "saved"), 8)
    read = run_episodes(engine, samples, agent(1.0))
    assert [r.main.ids for r in read] == [r.main.ids for r in sent]
    engine.load_weights(str(BASE), 9)
