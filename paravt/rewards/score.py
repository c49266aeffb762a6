"""One number for an episode, with its parts and its reasons.

    total = accuracy + format_weight x format + tool

Nothing is clipped or scaled, so two different totals stay different. A part that cannot be known is None; an
unknown accuracy makes the total None, and a None total is left out of its group, never counted as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from paravt.config import RewardConfig
from paravt.protocol.sites import Site
from paravt.rewards.accuracy import answer_accuracy
from paravt.rewards.format import episode_sites, format_score
from paravt.rewards.published import VARIANTS, degenerate, episode_text, published_format, published_tool
from paravt.rewards.tool import gated_tool
from paravt.rollout import Rollout, Sample


@dataclass(frozen=True)
class Reward:
    """The reward of one episode.

    `format` is the unweighted score, in [0, 1] by the default rule. `sites` has one outcome per structural
    site, whatever rule is used. `reasons` says in words why parts are unknown or not full.
    """

    accuracy: float | None
    format: float | None
    tool: float | None
    sites: tuple[Site, ...]
    total: float | None
    reasons: tuple[str, ...] = ()


def score(
    rollout: Rollout, sample: Sample, config: RewardConfig, judge_verdict: float | None = None
) -> Reward:
    """The reward of an episode: a pure function of its record. `judge_verdict` in [0, 1] was fetched before.

    A failed episode has no reward at all: each part is None.
    """
    if rollout.stop_reason == "failed":
        return Reward(None, None, None, (), None, (f"failed: {rollout.error or 'no reason given'}",))
    sites = episode_sites(rollout)
    accuracy, reason = answer_accuracy(rollout.answer, sample, config.open_ended, judge_verdict)
    reasons = [f"accuracy: {reason}"] if reason else []
    reasons += [f"format: {site.reason} (turn {site.turn})" for site in sites if not site.ok]
    format_part = _format(rollout, sites, config)
    tool = None if accuracy is None else _tool(rollout, accuracy, config)
    if tool is not None and config.tool != "off" and not rollout.call_count:
        reasons.append("tool: no call ran")
    total = None if accuracy is None else accuracy + config.format_weight * format_part + tool
    if total is not None and config.format in VARIANTS and degenerate(episode_text(rollout)):
        total = 0.0
        reasons.append("total: degenerate text")
    return Reward(accuracy, format_part, tool, sites, total, tuple(reasons))


def _format(rollout: Rollout, sites: tuple[Site, ...], config: RewardConfig) -> float:
    if config.format == "off":
        return 0.0
    if config.format == "sites":
        return format_score(sites)
    return published_format(episode_text(rollout), config.format)


def _tool(rollout: Rollout, accuracy: float, config: RewardConfig) -> float:
    if config.tool == "off":
        return 0.0
    if config.tool == "gated":
        return gated_tool(accuracy, rollout.call_count, config.tool_weight)
    readable = sum(len(turn.parsed.valid_calls) for turn in rollout.turns)
    return published_tool(accuracy, readable, rollout.call_count)
