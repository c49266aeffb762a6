"""From groups to rows: what is left out, what each token is credited with, and the counts under the loss."""

from __future__ import annotations

from dataclasses import replace
import math

import numpy as np
import pytest
import torch

from paravt.config import AnchoringConfig, GRPOConfig, OptimiserConfig, RewardConfig
from paravt.conversation import Conversation
from paravt.grpo.batch import Group, Row, make_micro_batches, step_rows, step_totals, with_bonus
from paravt.grpo.metrics import step_metrics
from paravt.parallel import Processes
from paravt.protocol import THINK_PREFIX, parse_turn
from paravt.rewards import Reward, score
from paravt.rollout import EpisodeTurn, Rollout, Sample
from tests.tiny import tiny_conversation, tiny_encoder

SAMPLE = Sample("s", "v.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
CONFIG = GRPOConfig(steps=1, prompts_per_step=1, optimiser=OptimiserConfig(learning_rate=1e-3))
OFF = AnchoringConfig(scope="off")


def episode(text: str = "x\n</think>\n<answer>A</answer>", stop: str = "answered") -> Rollout:
    encoder = tiny_encoder()
    main = encoder.start("You answer.", None, "v.mp4", "Which shape?", THINK_PREFIX)
    if stop == "failed":
        return Rollout("s", [], main, [], None, "failed", 4, error="the video is cut")
    first = len(main.ids)
    encoder.add_gold(main, text)
    turn = EpisodeTurn(THINK_PREFIX + text, parse_turn(THINK_PREFIX + text), span=(first, len(main.ids)))
    return Rollout("s", [turn], main, [], turn.parsed.answer, stop, 4, frames_seen=4)


def report(tokens: int) -> Conversation:
    conversation = tiny_encoder().start(None, None, "v.mp4", "Describe.")
    conversation.append_sampled(list(range(20, 20 + tokens)), [-1.0] * tokens)
    return conversation


def worth(rollout: Rollout, total: float | None) -> Reward:
    return replace(score(rollout, SAMPLE, RewardConfig()), total=total)


def group(*pairs: tuple[Rollout, float | None]) -> Group:
    rollouts = [rollout for rollout, _ in pairs]
    return Group(SAMPLE, 0, 4, rollouts, [worth(rollout, total) for rollout, total in pairs])


def rows_of(*groups: Group, anchoring: AnchoringConfig = OFF, **changes):
    return step_rows(tiny_encoder(), groups, CONFIG.model_copy(update=changes), anchoring)


def advantage(row) -> float:
    """The one value that all sampled tokens of a row carry; the others carry 0."""
    mask = np.asarray(row.conversation.loss_mask, dtype=bool)
    assert not row.advantages[~mask].any()
    assert len(set(row.advantages[mask])) == 1
    return float(row.advantages[mask][0])


def test_each_sampled_token_carries_the_group_advantage():
    made = rows_of(group((episode(), 1.0), (episode(), 0.0), (episode(), 0.0), (episode(), 0.0)))
    assert [advantage(row) for row in made.rows] == [1.5, -0.5, -0.5, -0.5]
    assert made.has_signal and made.without_spread == 0


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_an_episode_without_a_reward_is_left_out_and_the_others_are_as_without_it(missing):
    alone = rows_of(group((episode(), 1.0), (episode(), 0.0)))
    made = rows_of(group((episode(), 1.0), (episode("y"), missing), (episode(), 0.0)))
    assert [advantage(row) for row in made.rows] == [advantage(row) for row in alone.rows]
    assert made.left_out == {"no_reward": 1}
    assert made.denominators(9) == alone.denominators(9)


def test_a_failed_episode_is_left_out_of_advantages_and_of_format_rates():
    site = AnchoringConfig(scope="site", weight=1.0)
    pairs = [(episode(), 1.0), (episode("no closer"), 1.0)]
    alone = rows_of(group(*pairs), anchoring=site)
    made = rows_of(group(*pairs, (episode(stop="failed"), None)), anchoring=site)
    assert made.left_out == {"failed": 1}
    for row, other in zip(made.rows, alone.rows, strict=True):
        assert np.array_equal(row.advantages, other.advantages)
    assert alone.has_signal and alone.without_spread == 1  # anchors only


def test_a_group_that_failed_whole_leaves_the_step_without_signal():
    made = rows_of(group((episode(stop="failed"), None), (episode(stop="failed"), None)))
    assert made.rows == [] and not made.has_signal
    assert made.denominators(9).tokens == 0


def test_a_group_of_equal_totals_has_no_signal_whatever_other_groups_look_like():
    equal = group((episode(), 0.7), (episode(), 0.7))
    made = rows_of(equal, group((episode(), 1.0), (episode(), 0.0)))
    assert [advantage(row) for row in made.rows[:2]] == [0.0, 0.0]
    assert made.without_spread == 1
    assert not rows_of(equal).has_signal


def test_truncated_episodes_leave_the_loss_but_not_the_group():
    pairs = [(episode(), 1.0), (episode(stop="truncated"), 0.0)]
    made = rows_of(group(*pairs), mask_truncated=True)
    assert [advantage(row) for row in made.rows] == [pytest.approx(math.sqrt(0.5))]
    assert made.left_out == {"truncated": 1}
    assert len(rows_of(group(*pairs)).rows) == 2


def test_sub_agents_carry_the_main_advantage_in_the_same_denominator():
    caller = episode()
    caller.subagents += [report(5), report(7)]
    pair = group((caller, 1.0), (episode(), 0.0))
    plain, trained = rows_of(pair), rows_of(pair, train_subagents=True)
    assert [len(plain.rows), len(trained.rows)] == [2, 4]
    assert [advantage(row) for row in trained.rows[1:3]] == [advantage(trained.rows[0])] * 2
    assert trained.denominators(9).tokens == plain.denominators(9).tokens + 12
    assert trained.denominators(9).sequences == 4


def test_micro_batches_keep_each_token_with_its_advantage():
    long = episode("x " * 30 + "\n</think>\n<answer>A</answer>")
    made = rows_of(group((episode(), 1.0), (long, 0.0)), anchoring=AnchoringConfig(scope="site"))
    for budget, count in ((10_000, 1), (1, 2)):
        batches = make_micro_batches(made.rows, budget)
        assert len(batches) == count
        for micro in batches:
            assert micro.advantages.shape == micro.structural.shape == micro.batch.input_ids.shape
            assert not micro.advantages[micro.batch.loss_mask == 0].any()
            assert not (micro.structural & (micro.batch.loss_mask == 0)).any()
        total = sum(micro.advantages.double().sum() for micro in batches)
        assert total.item() == pytest.approx(sum(row.advantages.sum() for row in made.rows), abs=1e-5)
    ids = batches[0].batch.input_ids[0][batches[0].structural[0]]
    assert tiny_encoder().tokenizer.decode(ids).replace(" ", "") == "</think><answer></answer>"


def test_the_bonus_of_the_sequence_scope_is_part_of_the_total():
    whole = episode("I look at the red part.\n</think>\n<answer>A</answer>")
    sequence, rules = AnchoringConfig(scope="sequence"), RewardConfig(format="published_suffix")
    assert with_bonus(worth(whole, 1.0), whole, sequence, rules).total == pytest.approx(1.35)
    assert with_bonus(worth(whole, 1.0), whole, OFF, rules).total == 1.0
    assert with_bonus(worth(whole, None), whole, sequence, rules).total is None


def test_metrics_count_what_failed_and_average_what_is_known():
    groups = [
        group((episode(), 2.0), (episode("no closer", "truncated"), None)),
        group((episode(stop="failed"), None), (episode(stop="failed"), None)),
    ]
    values = step_metrics(step_totals(Processes(), groups, rows_of(*groups), 9), version=0)
    assert values["episodes"] == 4 and values["groups_failed"] == 1
    assert values["reward/total"] == 2.0
    assert (values["stop/failed"], values["stop/truncated"]) == (0.5, 0.25)
    assert (values["left_out/failed"], values["left_out/no_reward"]) == (2, 1)
    assert values["compliance"] == 0.5  # of the two that finished
    assert values["site/think"] == 0.5
    assert "site/call" not in values  # no call was begun: there is no rate
    assert torch.isfinite(torch.tensor(list(values.values()))).all()


def test_micro_batches_count_the_tokens_of_frames():
    """A frame of 64 x 64 pixels is 4 tokens beside its marks: all of them are in the budget."""
    few, many = (tiny_conversation([float(i) for i in range(n)], size=(64, 64)) for n in (1, 9))
    for conversation in (few, many):
        conversation.append_sampled([5], [-1.0])
    pads = [conversation.ids.count(conversation.image_pad_id) for conversation in (few, many)]
    assert pads == [4, 36] == [sum(v.token_count for v in c.visuals) for c in (few, many)]
    rows = [Row(c, np.zeros(len(c.ids)), np.zeros(len(c.ids), dtype=bool)) for c in (few, many)]
    together = 2 * len(many.ids)  # padding counted
    assert len(make_micro_batches(rows, together)) == 1
    assert len(make_micro_batches(rows, together - 1)) == 2
