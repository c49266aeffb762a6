"""Dynamic sampling: a prompt whose group teaches nothing gives its place in the step to another.

A group has signal if some token of it has an advantage other than 0: its totals have spread, or its
structural sites differ and are anchored. In round r = 0, 1, ... limit - 1 each place without signal is given
to the next prompt of the step's reserve,

    reserve of a step = the other prompts, in the order of hash(seed, "refill", step, sample id)
    place p, round r  = reserve[p + r x prompts of the step]      until the reserve is used up

so that who rolls a place out, in whatever order, rolls out the same prompt, and a resume draws as an unbroken
run does. The budget of a replacement is that of the epoch of the prompt whose place it takes. A place that
stays without signal after the last round keeps its first group, and counts as it would have without
refilling: no step is short.

What is thrown away was paid for: `rolled` counts the groups that were rolled out in addition, and as many
were thrown away; `empty` counts the places that stayed without signal. Rewards of a step are then those of
the groups that were kept: their mean leans towards prompts that are neither always right nor always wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paravt.hashing import Item, stable_hash

G = TypeVar("G")


@dataclass(frozen=True)
class Refilled(Generic[G]):
    """A step's groups after refilling, in their places, and what it took, in groups."""

    groups: list[G]
    rolled: int = 0
    empty: int = 0


def reserve_of_step(seed: int, step: int, items: Sequence[Item], ids: Sequence[str]) -> list[int]:
    """Positions in `ids` of the prompts that are not among the step's `items`, in the reserve's order."""
    visited = {item.index for item in items}
    others = [index for index in range(len(ids)) if index not in visited]
    return sorted(others, key=lambda index: (stable_hash("refill", seed, step, ids[index]), ids[index]))


def replacement(place: int, round_: int, items: Sequence[Item], reserve: Sequence[int]) -> Item | None:
    """The visit that takes `place` of the step in this round; None once the reserve has been gone through."""
    number = place + round_ * len(items)
    return Item(items[place].epoch, reserve[number]) if number < len(reserve) else None


def refill(
    groups: Mapping[int, G],
    limit: int,
    has_signal: Callable[[G], bool],
    draw: Callable[[int, int], Item | None],
    roll_out: Callable[[Sequence[Item]], Sequence[G]],
) -> Refilled[G]:
    """Give places without signal to other prompts, for at most `limit` rounds.

    `groups` are rewarded groups by their place in the step; one process has some of the places. `draw` gives
    the visit for (place, round), `roll_out` the rewarded groups of visits, in their order.
    """
    kept = dict(groups)
    waiting = [place for place, group in groups.items() if not has_signal(group)]
    rolled = 0
    for round_ in range(limit):
        drawn = [(place, item) for place in waiting if (item := draw(place, round_)) is not None]
        if not drawn:
            break
        made = roll_out([item for _, item in drawn])
        rolled += len(made)
        found = {place: group for (place, _), group in zip(drawn, made, strict=True) if has_signal(group)}
        kept |= found
        waiting = [place for place in waiting if place not in found]
    return Refilled(list(kept.values()), rolled, len(waiting))
