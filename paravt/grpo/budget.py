"""How many overview frames a prompt gets: the ratio gate.

    K = choices[ hash(seed, epoch, sample id) mod |choices| ]        choices in ascending order

K is uniform over the choices, the same in each process and after each resume, drawn anew each epoch, and
shared by the episodes of a group: their rewards differ by what they wrote, not by what they were shown. With
few frames the answer is often not visible, so that calling the tool earns what it is worth. Without gating K
is the largest choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from paravt.config import BudgetConfig
from paravt.hashing import stable_hash


def frame_budget(seed: int, epoch: int, sample_id: str, choices: Sequence[int]) -> int:
    """The budget of one sample in one epoch; the order in which `choices` are written does not matter."""
    ordered = sorted(choices)
    return ordered[stable_hash("frame budget", seed, epoch, sample_id) % len(ordered)]


def prompt_budget(config: BudgetConfig, seed: int, epoch: int, sample_id: str) -> int:
    """`frame_budget` where gating is on, else the largest choice."""
    return frame_budget(seed, epoch, sample_id, config.choices) if config.gating else max(config.choices)
