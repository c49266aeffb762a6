"""Several samples in one row, so that no token of a batch is padding.

    longest first, each into the fullest row that still has room for it, else into a new one

(best fit, decreasing). A row holds at most `capacity` tokens. A sample that is longer fits nowhere. Which
samples share a row changes nothing: none attends to another, and the loss counts tokens of the whole step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions in `lengths`, row by row; those of at most `capacity` tokens each occur once.

    Equal lengths keep their order, so the rows follow from the lengths alone.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), least room first
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[position]
        if length > capacity:
            continue
        fullest = bisect_left(rooms, (length, -1))
        if fullest < len(rooms):
            room, row = rooms.pop(fullest)
            rows[row].append(position)
        else:
            room, row = capacity, len(rows)
            rows.append([position])
        insort(rooms, (room - length, row))
    return rows
