"""Which structural sites the turns of an episode need, and what is wrong with them.

Each turn needs a think that is closed and says something, and an act: either calls, each valid and closed, or
one closed answer with content. The last turn's act is the answer. An answer begun beside calls is a site of
its own that is wrong. Rewards, metrics and the checks of training tables all ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paravt.rollout import ToolError, Turn


@dataclass(frozen=True)
class Site:
    """One structural site: its kind, the index of its turn, and what is wrong with it (None if `ok`)."""

    kind: Literal["think", "call", "answer"]
    turn: int
    ok: bool
    reason: str | None = None


def format_sites(turns: Sequence[Turn]) -> tuple[Site, ...]:
    """The sites of an episode in order of its turns."""
    sites = []
    for index, turn in enumerate(turns):
        faults = [("think", _think_fault(turn))]
        if turn.calls:
            faults.append(("call", _call_fault(turn)))
        if not turn.calls or turn.answer_opened or index == len(turns) - 1:
            faults.append(("answer", _answer_fault(turn)))
        sites += [Site(kind, index, fault is None, fault) for kind, fault in faults]
    return tuple(sites)


def _think_fault(turn: Turn) -> str | None:
    if not turn.think_opened:
        return "think not opened" if turn.think_closed else "no think"
    if not turn.think_closed:
        return "think not closed"
    return None if turn.think and turn.think.strip() else "think is empty"


def _call_fault(turn: Turn) -> str | None:
    error = next((call for call in turn.calls if isinstance(call, ToolError)), None)
    if error:
        return error.message
    return None if turn.calls_closed else "call not closed"


def _answer_fault(turn: Turn) -> str | None:
    if turn.calls:
        return "answer beside a call" if turn.answer_opened else "the episode ends on a call"
    if not turn.answer_opened:
        return "no answer block"
    if len(turn.answers) > 1:
        return "more than one answer block"
    if not turn.answers[0].strip():
        return "answer is empty"
    return None if turn.answer_closed else "answer not closed"
