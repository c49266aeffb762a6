"""Draws that depend on names, not on process state.

    stable_hash(part, ...) = first 8 bytes of SHA-256 over the JSON of the parts

Python's own `hash` is salted per process and a generator's state depends on all draws before it. These do
not: the same seed, epoch and sample give the same number in each process, in any order, after any resume.
The order of samples over a whole run is thus a function of the step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
import hashlib
import json
from typing import NamedTuple


def stable_hash(*parts: str | int | float | bool | None) -> int:
    """An integer in [0, 2**64) that depends on the parts alone. 1 and "1" are different parts."""
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, ids: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(
        sorted(range(len(ids)), key=lambda index: (stable_hash(seed, epoch, ids[index]), ids[index]))
    )


def epoch_order(seed: int, epoch: int, ids: Sequence[str]) -> tuple[int, ...]:
    """Positions in `ids` in the order in which epoch `epoch` visits them; each once."""
    return _epoch_order(seed, epoch, tuple(ids))


class Item(NamedTuple):
    """One visit: the sample at `index`, for the `epoch`-th time (from 0)."""

    epoch: int
    index: int


def items_of_step(seed: int, step: int, per_step: int, ids: Sequence[str]) -> list[Item]:
    """The samples that step `step` (from 0) visits.

    Steps are cut from one endless row of epochs, so none is short and none is lost at an epoch's border.
    Raises ValueError if there are no samples.
    """
    if not ids:
        raise ValueError("there are no samples to train on")
    positions = range(step * per_step, (step + 1) * per_step)
    epochs = {position // len(ids) for position in positions}
    orders = {epoch: epoch_order(seed, epoch, ids) for epoch in epochs}
    return [Item(p // len(ids), orders[p // len(ids)][p % len(ids)]) for p in positions]
