"""What calling the tool earns.

    gated   weight x accuracy if a call really ran, else 0

so that a call pays exactly as far as the answer is right: a bare call with a wrong answer earns nothing, and
a second or a repeated call adds nothing. That a call ran is known from the record of executions, never from
the text. The released ladder is in `published.py`.
"""

from __future__ import annotations


def gated_tool(accuracy: float, call_count: int, weight: float) -> float:
    """`call_count`: calls of the episode that really ran."""
    return weight * accuracy if call_count > 0 else 0.0
