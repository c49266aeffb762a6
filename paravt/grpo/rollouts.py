"""The episodes of a step: which prompts, how many frames, a group for each, and those that are rolled again.

What is drawn follows from (seed, step, sample id), whoever draws it and whenever: a process that has some of
a step's places, a thread that is some steps ahead, a run that was stopped and goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from paravt.agent import AgentSetup, run_episodes
from paravt.chat import ChatEncoder
from paravt.engines.base import Engine
from paravt.grpo.batch import Group, step_rows, with_bonus
from paravt.grpo.budget import prompt_budget
from paravt.grpo.refill import refill, replacement, reserve_of_step
from paravt.grpo.setup import GRPOSetup
from paravt.hashing import Item, items_of_step, stable_hash
from paravt.rewards import Reward
from paravt.rollout import Rollout, Sample

Score = Callable[[Rollout, Sample], Reward]


@dataclass(frozen=True)
class Rolled:
    """Groups of a step, and what refilling took (`rolled` and `empty`, in groups). They have rewards if
    refilling had to look at them, else none yet.
    """

    groups: list[Group]
    refills: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class StepRollouts:
    """Rolls out steps of one run. `around` gives the context in which the engine is to generate."""

    engine: Engine
    encoder: ChatEncoder
    samples: Sequence[Sample]
    setup: GRPOSetup
    score_fn: Score
    video_root: str | Path = "."
    around: Callable[[], AbstractContextManager] = nullcontext

    def roll_out(self, step: int, places: Sequence[int]) -> Rolled:
        """The groups of some places of the step; those that teach nothing are replaced if so configured.

        Raises EngineError if the engine cannot work.
        """
        config, ids = self.setup.grpo, [sample.id for sample in self.samples]
        items = items_of_step(self.setup.seed, step, config.prompts_per_step, ids)
        groups = self._groups(step, [items[place] for place in places])
        if not config.refill_limit:
            return Rolled(groups)
        reserve = reserve_of_step(self.setup.seed, step, items, ids)
        refilled = refill(
            dict(zip(places, self._rewarded(groups), strict=True)),
            config.refill_limit,
            lambda group: step_rows(self.encoder, [group], config, self.setup.anchoring).has_signal,
            lambda place, round_: replacement(place, round_, items, reserve),
            lambda visits: self._rewarded(self._groups(step, visits)),
        )
        return Rolled(refilled.groups, Counter(rolled=refilled.rolled, empty=refilled.empty))

    def _rewarded(self, groups: Sequence[Group]) -> list[Group]:
        return [rewarded(group, self.setup, self.score_fn) for group in groups]

    def _groups(self, step: int, items: Sequence[Item]) -> list[Group]:
        """A group for each item. At an epoch's border one step visits two epochs."""
        setup = self.setup
        groups = []
        for epoch, part in groupby(items, key=lambda item: item.epoch):
            samples = [self.samples[item.index] for item in part]
            budgets = {s.id: prompt_budget(setup.budget, setup.seed, epoch, s.id) for s in samples}
            agent = AgentSetup(
                self.encoder,
                setup.episode,
                setup.visual,
                budget=lambda sample, budgets=budgets: budgets[sample.id],
                seed=stable_hash("rollouts", setup.seed, step, epoch),
                group_size=setup.grpo.group_size,
                video_root=self.video_root,
            )
            with self.around():
                rollouts = run_episodes(self.engine, samples, agent)
            size = setup.grpo.group_size
            for number, sample in enumerate(samples):
                group = rollouts[number * size : (number + 1) * size]
                groups.append(Group(sample, epoch, budgets[sample.id], group, []))
        return groups


def rewarded(group: Group, setup: GRPOSetup, score_fn: Score) -> Group:
    """The group with its rewards; the frames that were decoded are checked against the budget."""
    check_budget(group)
    if fetch := getattr(score_fn, "fetch", None):  # what a score needs from elsewhere, for the group at once
        fetch(group.rollouts, group.sample)
    rewards = [
        with_bonus(score_fn(rollout, group.sample), rollout, setup.anchoring, setup.reward)
        for rollout in group.rollouts
    ]
    return Group(group.sample, group.epoch, group.frame_budget, group.rollouts, rewards)


def check_budget(group: Group) -> None:
    """Raises RuntimeError unless all episodes of the group saw the same frames, within their budget."""
    seen = {r.frames_seen for r in group.rollouts if r.stop_reason != "failed" or r.frames_seen}
    asked = {rollout.frame_budget for rollout in group.rollouts}
    if asked != {group.frame_budget} or len(seen) > 1 or any(n > group.frame_budget for n in seen):
        raise RuntimeError(
            f"sample {group.sample.id}: the budget is {group.frame_budget} frames, but its episodes had "
            f"budgets {sorted(asked)} and saw {sorted(seen)} frames"
        )
