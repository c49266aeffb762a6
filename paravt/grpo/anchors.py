"""The parseability anchor: format credit for the tokens that make the format, and for no others.

A turn has up to three structural sites: its think, its calls, its answer. Over all turns of the episodes of
one group, for each kind of site, with o = 1 where a site is right, 0 where it is not, and p their mean:

    anchor(site) = lambda (o - p)

centred, not divided by a spread: a group in which a kind always succeeds (or always fails) gives exactly 0,
and a rare fault is not blown up. The value is added to the advantages of that site's tag tokens. An episode
is thus never punished for tags of another kind or turn that it wrote well, and reasoning, windows and answers
are left to the reward. Turns are compared with each other too: where each episode closes its first think and
leaves its second open, the first closers gain and what stands in the place of the second ones loses, even in
a group of one.

Which tokens a site owns:

    written tags        every sampled token of them, whole or in part; a forced `<think>` was not sampled
    a missing closer    the token at which the segment ended: the first token of the tag that came instead,
                        or the token that ended the turn (the last one, if the turn was cut at its limit)
    no answer block     the token that ended the turn
    no think block      the turn's first token

`scope: structural` puts one group-normalised format score per episode on all those tokens; `sequence` adds
the released scalar bonus to the total reward instead, on all tokens; both are there for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math

import numpy as np

from paravt.chat import ChatEncoder
from paravt.config import AnchoringConfig, RewardConfig
from paravt.grpo.advantages import Spread, group_advantages
from paravt.protocol.turn import SiteKind, missing_closers, tag_spans
from paravt.rewards import Reward
from paravt.rewards.published import anchor_bonus, episode_text
from paravt.rollout import EpisodeTurn, Rollout

KINDS: tuple[SiteKind, ...] = ("think", "call", "answer")
Spans = list[tuple[int, int]]


def token_spans(encoder: ChatEncoder, ids: Sequence[int]) -> Spans:
    """Characters [start, end) of `encoder.decode(ids)` that each token accounts for.

    Tokens are decoded cumulatively. A character whose bytes are split over several tokens belongs to the last
    of them; the others have empty spans, and so have end tokens.
    """
    spans: Spans = []
    settled = length = 0  # tokens whose text can no longer change, and the characters of that text
    for position in range(len(ids)):
        text = encoder.decode(ids[settled : position + 1])
        # Bytes that are no character yet decode to a replacement sign, which a later token may still change.
        whole = len(text.rstrip("\ufffd"))
        start = spans[-1][1] if spans else 0
        spans.append((start, max(start, length + whole)))
        if whole == len(text):
            settled, length = position + 1, length + whole
    return spans


def site_tokens(encoder: ChatEncoder, rollout: Rollout, turn_index: int) -> dict[SiteKind, list[int]]:
    """Positions in the main conversation's ids that each site of one turn owns; see the module's table."""
    turn = rollout.turns[turn_index]
    first, end = turn.span
    if first == end:
        return {kind: [] for kind in KINDS}
    spans = _in_turn(encoder, rollout.main.ids[first:end], turn)
    owned: dict[SiteKind, set[int]] = {kind: set() for kind in KINDS}
    for tag in tag_spans(turn.text):
        owned[tag.kind] |= {i for i, (a, b) in enumerate(spans) if a < tag.end and b > tag.start}
    written = {tag.kind for tag in tag_spans(turn.text)} | {tag.kind for tag in missing_closers(turn.text)}
    for tag in missing_closers(turn.text):
        owned[tag.kind].add(_token_at(spans, tag.start))
    if "answer" not in written:
        owned["answer"].add(len(spans) - 1)
    if "think" not in written:
        owned["think"].add(0)
    return {kind: sorted(first + i for i in positions) for kind, positions in owned.items()}


@dataclass(frozen=True)
class Anchored:
    """One episode, over its T main ids: what anchoring adds to the advantages (float64 [T]), and where its
    structural sites have tokens (bool [T]).
    """

    advantages: np.ndarray
    structural: np.ndarray


def anchor_group(
    encoder: ChatEncoder,
    rollouts: Sequence[Rollout],
    rewards: Sequence[Reward],
    config: AnchoringConfig,
    spread: Spread = "sample",
) -> list[Anchored]:
    """The anchors of one group. Its rates are over the episodes given: leave unusable ones out before."""
    rates = site_rates(rewards)
    scores = group_advantages([reward.format for reward in rewards], spread)
    anchored = []
    for rollout, reward, score in zip(rollouts, rewards, scores, strict=True):
        advantages = np.zeros(len(rollout.main.ids))
        structural = np.zeros(len(rollout.main.ids), dtype=bool)
        owned = [site_tokens(encoder, rollout, turn) for turn in range(len(rollout.turns))]
        for site in reward.sites:
            positions = owned[site.turn][site.kind]
            structural[positions] = True
            if config.scope == "site":
                advantages[positions] += config.weight * (site.ok - rates[site.kind])
        if config.scope == "structural":
            advantages[structural] = config.weight * score
        anchored.append(Anchored(advantages, structural))
    return anchored


def site_rates(rewards: Sequence[Reward]) -> dict[SiteKind, float]:
    """Share of right sites of each kind that occurs in the group."""
    outcomes = {
        kind: [site.ok for reward in rewards for site in reward.sites if site.kind == kind] for kind in KINDS
    }
    return {kind: math.fsum(values) / len(values) for kind, values in outcomes.items() if values}


def sequence_bonus(rollout: Rollout, config: AnchoringConfig, reward: RewardConfig) -> float:
    """What `scope: sequence` adds to the total reward; 0 for the other scopes.

    The format rule `published_para` holds the bonus already; it is not paid twice.
    """
    if config.scope != "sequence" or reward.format == "published_para":
        return 0.0
    return anchor_bonus(episode_text(rollout), config.weight)


def _in_turn(encoder: ChatEncoder, ids: Sequence[int], turn: EpisodeTurn) -> Spans:
    """Token spans as characters of the turn's whole text, which begins with the forced prefix."""
    spans = token_spans(encoder, ids)
    prefix = len(turn.text) - len(encoder.decode(ids))
    return [(start + prefix, end + prefix) for start, end in spans]


def _token_at(spans: Spans, character: int) -> int:
    """The token that holds a character; past the last one, the token that ended the turn."""
    return next((i for i, (_, end) in enumerate(spans) if end > character), len(spans) - 1)
