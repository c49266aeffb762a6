"""A published trace, read: its tool turns one by one, and the turn that answers.

Assistant texts are read by `paravt.protocol.parse_turn`, the only parser there is. A tool's answer is words,
or only frames: a notice that frames come with it is no report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import re
from typing import Any

from paravt import protocol
from paravt.data.checks import whole_turn
from paravt.data.sentinel import RowError, media_of, text_of
from paravt.rollout import ToolCall, Turn
from paravt.times import TimeError, parse_window

MIN_REPORT_WORDS = 4
_RESPONSE = re.compile(r"<tool_response>(.*?)(?:</tool_response>|$)", re.DOTALL)
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_NOTICE = re.compile(r"\bframes?\b|successfully|\bcropped\b|\bthe tool\b", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """One assistant turn with calls, and what came back: a report a call, None where only frames came."""

    think: str
    calls: tuple[ToolCall, ...]
    reports: tuple[str | None, ...]


def read_steps(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Step], Turn]:
    """The tool turns, and the turn that answers. Raises RowError for a trace that is out of order."""
    steps: list[Step] = []
    at = 0
    while at < len(messages):
        if messages[at]["role"] != "assistant":
            raise RowError("its messages do not alternate")
        text = text_of(messages[at]).strip()
        parsed = protocol.parse_turn(whole_turn(text), max_calls=100)
        at += 1
        if not (parsed.think and parsed.think_closed and parsed.think.strip()):
            raise RowError("an assistant turn has no closed think")
        if not parsed.calls:
            if at < len(messages):
                raise RowError("it answers before its end")
            if not (parsed.answer and parsed.answer_closed and len(parsed.answers) == 1):
                raise RowError("its last turn has no single closed answer")
            return steps, parsed
        if len(parsed.valid_calls) != len(parsed.calls):
            raise RowError("a call cannot be read")
        answers = []
        while at < len(messages) and messages[at]["role"] in ("user", "tool"):
            answers.append(messages[at])
            at += 1
        steps.append(Step(parsed.think.strip(), parsed.valid_calls, _returned(answers, len(parsed.calls))))
    raise RowError("it ends without an answer")


def _returned(messages: Sequence[Mapping[str, Any]], calls: int) -> tuple[str | None, ...]:
    """What the tool said to each call; None where it only handed frames over."""
    blocks = []
    for message in messages:
        text = text_of(message).strip()
        frames = any(True for _ in media_of(message))
        found = [block.strip() for block in _RESPONSE.findall(text)] or [text]
        blocks += [_said(block) if frames else block or None for block in found]
    if len(blocks) != calls:
        raise RowError(f"{calls} calls got {len(blocks)} answers")
    return tuple(blocks)


def _said(text: str) -> str | None:
    """What is left of a tool's text beside the notice that frames come with it."""
    kept = [sentence for sentence in SENTENCE.split(text) if sentence and not _NOTICE.search(sentence)]
    report = " ".join(kept).strip()
    return report if len(report.split()) >= MIN_REPORT_WORDS else None


def window_of(call: ToolCall, duration_s: float) -> tuple[float, float]:
    """The window of a call, cut to its video. Raises RowError if it is not in it."""
    try:
        window = parse_window(call.arguments.get("start_time"), call.arguments.get("end_time"), duration_s)
    except TimeError:
        raise RowError("a call's window is not in its video") from None
    return window.start_s, window.end_s
