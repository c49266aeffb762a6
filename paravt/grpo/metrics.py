"""What to watch: one flat dict of numbers per step, without times.

    reward/*      mean of total, accuracy, format, tool over the episodes where it is known
    compliance    share of finished episodes in which every turn is well formed and the last one answers
    site/*        share of structural sites that are right, by kind
    calls/*       calls per episode: run, and not run by reason
    stop/*        shares of how episodes ended; failed ones are among them
    left_out/*    episodes that do not train, by reason

A number that has nothing behind it (no call was begun, say) is absent, not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from paravt.grpo.anchors import site_rates
from paravt.grpo.batch import Group, StepRows
from paravt.rollout import Rollout, StopReason


def step_metrics(groups: Sequence[Group], rows: StepRows, version: int) -> dict[str, float]:
    """Metrics of what was sampled; `version` is the weights' at the time, for the staleness."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    finished = [rollout for rollout in rollouts if rollout.stop_reason != "failed"]
    values = {
        "reward/total": mean(reward.total for reward in rewards),
        "reward/accuracy": mean(reward.accuracy for reward in rewards),
        "reward/format": mean(reward.format for reward in rewards),
        "reward/tool": mean(reward.tool for reward in rewards),
        "compliance": mean(rollout.compliant for rollout in finished),
        "calls/run": mean(rollout.call_count for rollout in finished),
        "turns_per_episode": mean(len(rollout.turns) for rollout in finished),
        "frames_per_episode": mean(frames_read(rollout) for rollout in finished),
        "tokens_per_episode": mean(tokens_written(rollout) for rollout in finished),
        "budget": mean(group.frame_budget for group in groups),
        "groups_without_spread": rows.without_spread / len(groups),
        "groups_failed": sum(all(r.stop_reason == "failed" for r in group.rollouts) for group in groups),
        "staleness": max((version - v for r in finished for v in r.weight_versions), default=None),
        "episodes": len(rollouts),
    }
    values |= {f"site/{kind}": rate for kind, rate in site_rates(rewards).items()}
    for status in ("error", "malformed", "over_cap"):
        values[f"calls/{status}"] = mean(_calls(rollout, status) for rollout in finished)
    for stop in get_args(StopReason):
        values[f"stop/{stop}"] = sum(rollout.stop_reason == stop for rollout in rollouts) / len(rollouts)
    for reason in ("failed", "no_reward", "truncated"):
        values[f"left_out/{reason}"] = rows.left_out[reason]
    return {name: value for name, value in values.items() if value is not None}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None if there are none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def frames_read(rollout: Rollout) -> int:
    """Frames that were decoded for an episode: the overview and all crops that ran."""
    return rollout.frames_seen + sum(len(execution.times_s) for execution in rollout.executions)


def tokens_written(rollout: Rollout) -> int:
    """Tokens that were sampled for an episode, sub-agents included."""
    return rollout.main.sampled_count + sum(report.sampled_count for report in rollout.subagents)


def _calls(rollout: Rollout, status: str) -> int:
    return sum(execution.status == status for execution in rollout.executions)
