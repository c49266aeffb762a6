"""From a step's groups to rows of tokens with their advantages.

    advantage of a token = group advantage of the episode's total  +  anchors of the site it belongs to

A row is one conversation: the main one of each usable episode, and with `train_subagents` those of its
sub-agents, which carry the main advantage and no anchors. An episode is left out, and counted, if

    failed      it could not be run to its end
    no_reward   its total is missing or not finite; the others of its group are compared without it
    truncated   it ended at the token limit and `mask_truncated` is set; it still counts in its group

The denominators of the loss count the rows that are left, once, for the whole step: over all processes,
each of which has its own prompts with their whole groups. What is said of a step is said of all of them
(`StepTotals`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from paravt.chat import ChatEncoder
from paravt.config import AnchoringConfig, GRPOConfig, RewardConfig
from paravt.conversation import Conversation
from paravt.grpo.advantages import group_advantages, has_spread, usable_rewards
from paravt.grpo.anchors import anchor_group, sequence_bonus
from paravt.grpo.loss import Denominators
from paravt.model import Batch, blank_batch, collate
from paravt.parallel import Processes
from paravt.rewards import Reward
from paravt.rollout import Rollout, Sample
from paravt.training import micro_batches


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt with their rewards; all saw the same `frame_budget`."""

    sample: Sample
    epoch: int
    frame_budget: int
    rollouts: list[Rollout]
    rewards: list[Reward]


@dataclass(frozen=True)
class Row:
    """One conversation of T tokens: advantages float64 [T], 0 off the loss mask; structural bool [T]."""

    conversation: Conversation
    advantages: np.ndarray
    structural: np.ndarray


@dataclass
class StepRows:
    """What a step trains on, and what it left out by reason. `without_spread` counts groups."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    without_spread: int = 0

    @property
    def has_signal(self) -> bool:
        """Whether any token has an advantage other than 0."""
        return any(row.advantages.any() for row in self.rows)

    def denominators(self, longest: int) -> Denominators:
        tokens = sum(row.conversation.sampled_count for row in self.rows)
        return Denominators(tokens, len(self.rows), longest)


@dataclass(frozen=True)
class StepTotals:
    """A step as all processes know it: groups in the order of its prompts, what was left out, and the
    counts that the loss is divided by.
    """

    groups: list[Group]
    left_out: Counter[str]
    without_spread: int
    has_signal: bool
    denominators: Denominators


@dataclass(frozen=True)
class MicroBatch:
    """Rows side by side: the model's batch, advantages float32 [B, T], structural bool [B, T]."""

    batch: Batch
    advantages: torch.Tensor
    structural: torch.Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(self.batch.to(device), self.advantages.to(device), self.structural.to(device))


def with_bonus(reward: Reward, rollout: Rollout, anchoring: AnchoringConfig, config: RewardConfig) -> Reward:
    """The reward with the scalar anchor of `scope: sequence` in its total."""
    bonus = 0.0 if reward.total is None else sequence_bonus(rollout, anchoring, config)
    return replace(reward, total=reward.total + bonus) if bonus else reward


def step_rows(
    encoder: ChatEncoder, groups: Sequence[Group], config: GRPOConfig, anchoring: AnchoringConfig
) -> StepRows:
    """The rows of a step, in the order of groups and episodes."""
    step = StepRows()
    for group in groups:
        totals = [reward.total for reward in group.rewards]
        step.without_spread += not has_spread(usable_rewards(totals))
        reasons = [_unusable(rollout, total) for rollout, total in zip(group.rollouts, totals, strict=True)]
        usable = [i for i, reason in enumerate(reasons) if reason is None]
        step.left_out.update(reason for reason in reasons if reason)
        rollouts, rewards = [group.rollouts[i] for i in usable], [group.rewards[i] for i in usable]
        anchored = anchor_group(encoder, rollouts, rewards, anchoring, config.spread)
        advantages = group_advantages([totals[i] for i in usable], config.spread)
        for rollout, advantage, anchor in zip(rollouts, advantages, anchored, strict=True):
            if config.mask_truncated and rollout.stop_reason == "truncated":
                step.left_out["truncated"] += 1
                continue
            step.rows.append(_row(rollout.main, advantage + anchor.advantages, anchor.structural))
            if config.train_subagents:
                step.rows += [_row(conversation, advantage) for conversation in rollout.subagents]
    return step


def step_totals(processes: Processes, groups: Sequence[Group], rows: StepRows, longest: int) -> StepTotals:
    """Put together what each process has of a step; `longest` allowed turn in tokens."""
    own = StepTotals(
        list(groups), rows.left_out, rows.without_spread, rows.has_signal, rows.denominators(longest)
    )
    if processes.count == 1:
        return own
    parts = processes.gather(replace(own, groups=[without_pixels(group) for group in groups]))
    denominators = [part.denominators for part in parts]
    return StepTotals(
        processes.merge([part.groups for part in parts]),
        sum((part.left_out for part in parts), Counter()),
        sum(part.without_spread for part in parts),
        any(part.has_signal for part in parts),
        Denominators(sum(d.tokens for d in denominators), sum(d.sequences for d in denominators), longest),
    )


def without_pixels(group: Group) -> Group:
    """The group with the times of its frames and not their pixels: what another process needs to know of
    it.
    """

    def bare(conversation: Conversation) -> Conversation:
        copied = conversation.copy()
        copied.visuals = [replace(visual, image=None) for visual in conversation.visuals]
        return copied

    rollouts = [
        replace(rollout, main=bare(rollout.main), subagents=[bare(part) for part in rollout.subagents])
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts)


def blank_micro_batch() -> MicroBatch:
    """A pass that gives no loss, for a process that waits for the others."""
    batch = blank_batch()
    return MicroBatch(batch, torch.zeros(batch.input_ids.shape), torch.zeros(batch.input_ids.shape).bool())


def make_micro_batches(rows: Sequence[Row], max_tokens: int) -> list[MicroBatch]:
    """Rows of like length together, each batch within `max_tokens` padded tokens; the order is fixed."""
    lengths = [len(row.conversation.ids) for row in rows]
    return [_collate([rows[i] for i in positions]) for positions in micro_batches(lengths, max_tokens)]


def _unusable(rollout: Rollout, total: float | None) -> str | None:
    if rollout.stop_reason == "failed" or not rollout.main.sampled_count:
        return "failed"
    return None if usable_rewards([total]) else "no_reward"


def _row(
    conversation: Conversation, advantages: float | np.ndarray, structural: np.ndarray | None = None
) -> Row:
    mask = np.asarray(conversation.loss_mask, dtype=bool)
    none = np.zeros(len(mask), dtype=bool)
    return Row(conversation, np.where(mask, advantages, 0.0), none if structural is None else structural)


def _collate(rows: Sequence[Row]) -> MicroBatch:
    batch = collate([row.conversation for row in rows])
    advantages = torch.zeros(batch.input_ids.shape)
    structural = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        advantages[index, : len(row.advantages)] = torch.from_numpy(row.advantages)
        structural[index, : len(row.structural)] = torch.from_numpy(row.structural)
    return MicroBatch(batch, advantages, structural)
