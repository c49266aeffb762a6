"""What to watch: one flat dict of numbers per step, without times.

    reward/*      mean of total, accuracy, format, tool over the episodes where it is known
    compliance    share of finished episodes in which every turn is well formed and the last one answers
    site/*        share of structural sites that are right, by kind
    unclosed/*    share of finished episodes that left a tag of the kind unclosed
    fault/*       share of finished episodes with the format fault, by what is wrong
    calls/*       calls per episode: run, and not run by status
    failures/*    calls per episode that did not run, by reason
    stop/*        shares of how episodes ended; failed ones are among them
    left_out/*    episodes that do not train, by reason

A number that has nothing behind it (no call was begun, say) is absent, not 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from paravt.grpo.anchors import KINDS, site_rates
from paravt.grpo.batch import StepTotals
from paravt.protocol.sites import Site
from paravt.protocol.turn import missing_closers
from paravt.rewards.format import episode_sites
from paravt.rollout import Execution, Rollout, StopReason

# What is wrong with a site, by the words of protocol.sites; an unreadable call has the words of its error.
FAULTS = {
    "no think": "no_think",
    "think not opened": "think_not_opened",
    "think not closed": "think_not_closed",
    "think is empty": "think_empty",
    "call not closed": "call_not_closed",
    "answer beside a call": "answer_beside_call",
    "the episode ends on a call": "ends_on_call",
    "no answer block": "no_answer",
    "more than one answer block": "several_answers",
    "answer is empty": "answer_empty",
    "answer not closed": "answer_not_closed",
}
UNREADABLE = "call_unreadable"

# Why a call did not run, by words of the text that answered it. The first that fits is taken.
FAILURES = (
    ("not run: at most", "over_cap"),
    ("not run: no tool turn", "no_turn_left"),
    ("unknown tool", "unknown_tool"),
    ("empty call", "empty"),
    ("no call in this block", "empty"),
    ("call too long", "too_long"),
    ("not valid JSON", "not_json"),
    ("not a valid Python call", "not_python"),
    ("only plain calls", "not_python"),
    ("before it starts", "inverted_window"),
    ("the window is empty", "empty_window"),
    ("after the end", "outside_video"),
    ("before the video starts", "outside_video"),
    ("before the start of the video", "outside_video"),
    ("is not a time", "not_a_time"),
    ("must be a time", "not_a_time"),
    ('a "name"', "no_name"),
    ('with "name"', "no_name"),
    ("is missing", "missing_argument"),
    ("arguments", "wrong_arguments"),
    ("num_frames must be", "wrong_arguments"),
    ("is given twice", "wrong_arguments"),
)
OTHER = "other"


def step_metrics(step: StepTotals, version: int) -> dict[str, float]:
    """Metrics of what was sampled; `version` is the weights' at the time, for the staleness."""
    groups = step.groups
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
        "frames_per_episode": mean(rollout.frames_read for rollout in finished),
        "tokens_per_episode": mean(rollout.tokens_written for rollout in finished),
        "budget": mean(group.frame_budget for group in groups),
        "groups_without_spread": step.without_spread / len(groups),
        "groups_failed": sum(all(r.stop_reason == "failed" for r in group.rollouts) for group in groups),
        "staleness": max((version - v for r in finished for v in r.weight_versions), default=None),
        "episodes": len(rollouts),
    }
    values |= {f"site/{kind}": rate for kind, rate in site_rates(rewards).items()}
    for kind in KINDS:
        values[f"unclosed/{kind}"] = mean(kind in unclosed(rollout) for rollout in finished)
    faults = [{fault_of(site) for site in episode_sites(rollout) if not site.ok} for rollout in finished]
    for fault in (*FAULTS.values(), UNREADABLE):
        values[f"fault/{fault}"] = mean(fault in found for found in faults)
    failures = [[failure_of(e) for e in rollout.executions if e.status != "ok"] for rollout in finished]
    for reason in dict.fromkeys([*(reason for _, reason in FAILURES), OTHER]):
        values[f"failures/{reason}"] = mean(found.count(reason) for found in failures)
    for status in ("error", "malformed", "over_cap"):
        values[f"calls/{status}"] = mean(_calls(rollout, status) for rollout in finished)
    for stop in get_args(StopReason):
        values[f"stop/{stop}"] = sum(rollout.stop_reason == stop for rollout in rollouts) / len(rollouts)
    for reason in ("failed", "no_reward", "truncated"):
        values[f"left_out/{reason}"] = step.left_out[reason]
    return {name: value for name, value in values.items() if value is not None}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None if there are none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def unclosed(rollout: Rollout) -> set[str]:
    """Kinds of structural tags that the episode left unclosed."""
    return {tag.kind for turn in rollout.turns for tag in missing_closers(turn.text)}


def fault_of(site: Site) -> str:
    """The name of what is wrong with a site that is not right."""
    return FAULTS.get(site.reason, UNREADABLE)


def failure_of(execution: Execution) -> str:
    """The name of the reason for which a call did not run."""
    words = execution.report
    return next((reason for sign, reason in FAILURES if sign in words), OTHER)


def _calls(rollout: Rollout, status: str) -> int:
    return sum(execution.status == status for execution in rollout.executions)
