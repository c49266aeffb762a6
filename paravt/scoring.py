"""Scoring rollouts that were made elsewhere: one JSON object a line in, one reward a line out.

    question_type    "mcq", "tvg" or "oe"
    answer           a letter, [start_s, end_s], or a text
    options          list of texts; may be empty, then an mcq answer is a letter from A to J
    assistant_turns  list of texts, one a turn, the forced prefix included
    executed         list of counts, one a turn: how many of its calls really ran

The turns go through the project's own parser and rewards. What ran is what `executed` says, whatever the text
claims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
import json
from pathlib import Path
from typing import Any

from paravt.config import RewardConfig
from paravt.conversation import Conversation
from paravt.protocol import TOOL_NAME, parse_turn, read_span
from paravt.rewards import score
from paravt.rollout import LETTERS, EpisodeTurn, Execution, Rollout, Sample, SampleError, ToolCall


class ScoringError(ValueError):
    """A file or a line that cannot be scored; the message starts with file:line."""


def score_file(path: str | Path, config: RewardConfig | None = None) -> Iterator[dict]:
    """The rewards of the rollouts in `path`, in order; blank lines are passed over.

    Each is a dict with accuracy, format, tool, sites, total and reasons. Raises ScoringError at the first
    line that cannot be scored, and for a file without any.
    """
    config = config or RewardConfig()
    count = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    count += 1
                    yield _score_line(line, f"{path}:{number}", config)
    except OSError as error:
        raise ScoringError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ScoringError(f"{path}: not UTF-8 text ({error.reason})") from error
    if not count:
        raise ScoringError(f"{path}: holds no rollout")


def score_row(row: dict, where: str = "row", config: RewardConfig | None = None) -> dict:
    """The reward of one outside rollout. Raises ScoringError, its message starting with `where`."""
    sample = _sample(row, where)
    turns = _turns(row, where)
    rollout = Rollout(
        sample_id=sample.id,
        turns=turns,
        main=Conversation(image_pad_id=-1),
        subagents=[],
        answer=turns[-1].parsed.answer,
        stop_reason="no_answer" if turns[-1].parsed.answer is None else "answered",
        frame_budget=0,
    )
    reward = asdict(score(rollout, sample, config or RewardConfig()))
    keys = ("accuracy", "format", "tool", "sites", "total", "reasons")
    return {key: list(reward[key]) if isinstance(reward[key], tuple) else reward[key] for key in keys}


def _score_line(line: str, where: str, config: RewardConfig) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ScoringError(f"{where}: not a JSON object ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict):
        raise ScoringError(f"{where}: not a JSON object but a {type(row).__name__}")
    return score_row(row, where, config)


def _field(row: dict, name: str, where: str) -> Any:
    if name not in row:
        raise ScoringError(f"{where}: field {name} is missing")
    return row[name]


def _sample(row: dict, where: str) -> Sample:
    kind, answer = _field(row, "question_type", where), _field(row, "answer", where)
    options = [] if row.get("options") is None else row["options"]
    if kind not in ("mcq", "tvg", "oe"):
        raise ScoringError(f"{where}: question_type is {kind!r}; use mcq, tvg or oe")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ScoringError(f"{where}: options must be a list of texts")
    if len(options) > len(LETTERS):
        raise ScoringError(f"{where}: {len(options)} options; {len(LETTERS)} at most")
    if kind == "tvg":
        answer = _span(answer, where)
    elif not isinstance(answer, str):
        raise ScoringError(f"{where}: answer is {answer!r}; an {kind} answer is a text")
    if kind == "mcq" and not options:
        options = list(LETTERS)  # each letter is an option that reads as itself
    try:
        return Sample(where, "", "", answer, kind, tuple(options))
    except SampleError as error:
        raise ScoringError(str(error).replace(f"sample {where}", where, 1)) from error


def _span(answer: Any, where: str) -> tuple[float, float]:
    if isinstance(answer, str):
        answer = read_span(answer) or answer
    numbers = isinstance(answer, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in answer
    )
    if not numbers or len(answer) != 2 or not 0 <= answer[0] <= answer[1] < 1e9:
        raise ScoringError(f"{where}: answer is {answer!r}; a tvg answer is [start_s, end_s]")
    return float(answer[0]), float(answer[1])


def _turns(row: dict, where: str) -> list[EpisodeTurn]:
    texts, executed = _field(row, "assistant_turns", where), _field(row, "executed", where)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ScoringError(f"{where}: assistant_turns must be a list of texts, one or more")
    counts = isinstance(executed, list) and all(
        isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= 1000 for count in executed
    )
    if not counts or len(executed) != len(texts):
        raise ScoringError(f"{where}: executed must be a list of {len(texts)} counts, one for each turn")
    return [
        EpisodeTurn(text, parse_turn(text), (Execution(ToolCall(TOOL_NAME, {}), "ok", ""),) * count)
        for text, count in zip(texts, executed, strict=True)
    ]
