"""Group-relative advantages: what an episode's reward is worth beside those of its group.

For the usable rewards r of one group, n of them, with mean m:

    sample          (r - m) / s,  s the standard deviation with n - 1      the default
    population      (r - m) / s,  s the standard deviation with n
    leave_one_out   r - mean of the others
    none            r - m

There is no epsilon beside s. Whether a group has spread at all is decided first, by max - min <= 1e-6 in
float64: then each advantage is exactly 0. Eight rewards of 0.7 have a float32 standard deviation of 6e-8, and
dividing by it would turn rounding into signal. A reward that is missing (None, NaN or infinite) gets 0 and
takes no part in mean and spread; so does the only reward of a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Literal

Spread = Literal["sample", "population", "leave_one_out", "none"]
NO_SPREAD = 1e-6


def group_advantages(rewards: Sequence[float | None], spread: Spread = "sample") -> list[float]:
    """Advantages of one group, aligned with `rewards`. The order of the group does not matter, to the bit."""
    usable = usable_rewards(rewards)
    if not has_spread(usable):
        return [0.0] * len(rewards)
    count = len(usable)
    mean = math.fsum(usable) / count
    if spread == "leave_one_out":
        scale = (count - 1) / count  # r - mean of the others = (r - m) n / (n - 1)
    elif spread == "none":
        scale = 1.0
    else:
        squares = math.fsum((reward - mean) ** 2 for reward in usable)
        scale = math.sqrt(squares / (count - 1 if spread == "sample" else count))
    return [(float(reward) - mean) / scale if _is_usable(reward) else 0.0 for reward in rewards]


def usable_rewards(rewards: Sequence[float | None]) -> list[float]:
    """The rewards that are finite numbers."""
    return [float(reward) for reward in rewards if _is_usable(reward)]


def has_spread(usable: Sequence[float]) -> bool:
    """False for fewer than two rewards, and for rewards that are equal within rounding."""
    return len(usable) > 1 and max(usable) - min(usable) > NO_SPREAD


def _is_usable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)
