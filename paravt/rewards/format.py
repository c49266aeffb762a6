"""How much of its structure an episode wrote well; the sites are those of `paravt.protocol.sites`.

    format = 1/2 [every think is right] + 1/2 [every act is right]

Full format is compliance, with any number of calls or with none. Both halves ask for all turns at once. A
mean over the sites would rise with each well-written turn, and an episode whose answer is malformed could buy
format back by calling; here no turn that is added to an episode can raise its format, and turns that are well
written never lower it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paravt.protocol.sites import Site, format_sites
from paravt.rollout import Rollout


def format_score(sites: Sequence[Site]) -> float:
    """0, 1/2 or 1: half for the thinks, half for the acts; 0 without any site."""
    thinks = all(site.ok for site in sites if site.kind == "think")
    acts = all(site.ok for site in sites if site.kind != "think")
    return (thinks + acts) / 2 if sites else 0.0


def episode_sites(rollout: Rollout) -> tuple[Site, ...]:
    return format_sites([turn.parsed for turn in rollout.turns])
