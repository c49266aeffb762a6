"""SFT on eight traces: the loss falls, and greedy episodes then answer in the taught format."""

from __future__ import annotations

import json

import pytest
import torch

from paravt.agent import AgentSetup, run_episodes
from paravt.config import OptimiserConfig, RewardConfig
from paravt.engines import TransformersEngine
from paravt.model import load_encoder, load_model
from paravt.reporter import LogReporter
from paravt.rewards import score
from paravt.rollout import Sample
from paravt.sft import train
from paravt.video import VideoError
from tests.tiny import VISUAL, build_tiny
from tests.training_world import EPISODE, question, report_trace, run_sft, sft_setup, trace, write_clips

STEPS = 60
LEARNING = OptimiserConfig(learning_rate=5e-3, schedule="cosine", warmup_share=0.1)
# The asked part decides the letter: a constant answer is right in half of the cases.
QUESTIONS = [question(number, "AB"[number // 2 % 2]) for number in range(8)]
TRACES = [
    trace(number, f"look\n</think>\n<answer>{asked.answer}</answer>", asked)
    for number, asked in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    write_clips(folder)
    return build_tiny(folder / "base")


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_taught_format_and_answers_are_learned(base, tmp_path):
    setup = sft_setup(steps=STEPS, batch_size=8, save_every=STEPS, optimiser=LEARNING)
    model, encoder = run_sft(tmp_path, base, TRACES, setup, base.parent)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] > 4 and rows[-1]["loss"] < 0.1
    assert rows[0]["token_accuracy"] < 0.1 and rows[-1]["token_accuracy"] == 1.0

    greedy = EPISODE.model_copy(update={"temperature": 0.0})
    agent = AgentSetup(encoder, greedy, VISUAL, lambda sample: 4, seed=1, video_root=base.parent)
    episodes = run_episodes(TransformersEngine(model, encoder.end_ids), QUESTIONS, agent)
    assert all(episode.compliant for episode in episodes)
    rewards = [score(e, q, RewardConfig()) for e, q in zip(episodes, QUESTIONS, strict=True)]
    assert [reward.accuracy for reward in rewards] == [1.0] * 8


def test_the_loss_does_not_depend_on_the_micro_batch_size(base, tmp_path):
    traces = [*TRACES, report_trace(8)]
    losses = []
    for tokens in (1, 300, 100_000):
        setup = sft_setup(steps=2, batch_size=9, micro_batch_tokens=tokens)
        run_sft(tmp_path / str(tokens), base, traces, setup, base.parent)
        losses.append([row["loss"] for row in metrics(tmp_path / str(tokens))])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_each_weight_moves_but_those_of_a_frozen_vision_tower(base, tmp_path, frozen):
    before = load_model(base).state_dict()
    model, _ = run_sft(tmp_path, base, TRACES, sft_setup(steps=2, freeze_vision=frozen), base.parent)
    for name, weight in model.state_dict().items():
        still = frozen and ".visual." in name
        assert torch.equal(weight, before[name]) == still, name


def test_a_video_that_cannot_be_read_is_left_out_and_counted(base, tmp_path):
    lost = Sample("lost", "missing.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
    traces = [*TRACES, trace(99, "look\n</think>\n<answer>A</answer>", lost)]
    model, encoder = load_model(base), load_encoder(base, VISUAL)
    result = train(
        model, encoder, traces, sft_setup(steps=2, batch_size=9), LogReporter(), tmp_path, base.parent
    )
    assert result.counts == {"video missing": 2}
    rows = metrics(tmp_path)
    assert [row["traces_left_out"] for row in rows] == [1, 1]
    assert rows[0]["tokens"] == 8 * 16


def test_traces_of_which_none_can_be_read_end_the_run(base, tmp_path):
    model, encoder = load_model(base), load_encoder(base, VISUAL)
    with pytest.raises(VideoError):
        train(model, encoder, TRACES, sft_setup(), LogReporter(), tmp_path, tmp_path)
