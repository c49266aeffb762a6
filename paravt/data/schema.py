"""Tables of questions and traces: how a line is read, what makes it wrong, and the frame that suites look at.

A table is a jsonl file. Questions (`rl`, `eval`) are lines of `rollout.Sample`; traces (`sft`) are lines of
`TraceRow`. Two ways to read one:

    read_rows      tolerant: any JSON object is kept with its line number, for a frame that can be judged
    read_traces    strict: rows that have passed; the first bad one raises

A frame has a column per field and a column per check of `data.checks`. A field that no row has gives no
column at all, and neither does a check that needs it: a suite then says "missing", not "all values fine".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paravt.data.checks import (
    OK,
    check_agreement,
    check_answer,
    check_roles,
    check_span,
    check_targets,
    check_windows,
)
from paravt.rollout import Sample

if TYPE_CHECKING:
    import pandas as pd

TRACE_KINDS = ("main", "subagent")
DURATION_SLACK_S = 0.5


class TableError(ValueError):
    """A table that cannot be read at all; the message names the file and the line."""


@dataclass(frozen=True)
class TraceTurn:
    """One turn to learn from: an assistant's text (after the forced `<think>`), or the tools' results."""

    role: Literal["assistant", "tool"]
    text: str = ""
    results: tuple[str, ...] = ()

    def to_json(self) -> dict:
        if self.role == "assistant":
            return {"role": self.role, "text": self.text}
        return {"role": self.role, "results": list(self.results)}


@dataclass(frozen=True)
class TraceRow:
    """One SFT trace. `window_s` is the crop of a sub-agent's trace and None for the main agent's."""

    id: str
    sample: Sample
    frame_budget: int
    kind: Literal["main", "subagent"]
    turns: tuple[TraceTurn, ...]
    window_s: tuple[float, float] | None = None

    def to_json(self) -> dict:
        data = {
            "id": self.id,
            "sample": self.sample.to_json(),
            "frame_budget": self.frame_budget,
            "kind": self.kind,
            "turns": [turn.to_json() for turn in self.turns],
        }
        return data if self.window_s is None else data | {"window_s": list(self.window_s)}

    @classmethod
    def from_json(cls, data: dict) -> TraceRow:
        turns = tuple(
            TraceTurn(turn["role"], turn.get("text", ""), tuple(turn.get("results", ())))
            for turn in data["turns"]
        )
        window = data.get("window_s")
        return cls(
            id=data["id"],
            sample=Sample.from_json(data["sample"]),
            frame_budget=data["frame_budget"],
            kind=data["kind"],
            turns=turns,
            window_s=None if window is None else (float(window[0]), float(window[1])),
        )


@dataclass(frozen=True)
class Row:
    """A JSON object of a table with the number of its line, before anything is believed about it."""

    line: int
    data: dict[str, Any]

    @property
    def name(self) -> str:
        """How a person finds the row: its id where it has one, and its line."""
        identity = self.data.get("id")
        return f"{identity} (line {self.line})" if isinstance(identity, str) else f"line {self.line}"


def read_rows(path: str | Path) -> list[Row]:
    """Every non-empty line of a table. Raises TableError for a missing file or a line that is no object."""
    return list(_read(Path(path)))


def _read(path: Path) -> Iterator[Row]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                data = json.loads(line)
                if not isinstance(data, dict):
                    raise TableError(f"{path}:{number}: a {type(data).__name__}, not a JSON object")
                yield Row(number, data)
    except FileNotFoundError as error:
        raise TableError(f"{path}: no such table") from error
    except json.JSONDecodeError as error:
        raise TableError(f"{path}:{number}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_traces(path: str | Path) -> list[TraceRow]:
    """The traces of a validated table. Raises TableError naming the first row that is not one."""
    traces = []
    for row in read_rows(path):
        try:
            traces.append(TraceRow.from_json(row.data))
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"{path}:{row.line}: not a trace ({type(error).__name__}: {error})") from error
    return traces


def question_frame(rows: Sequence[Row], videos: Mapping[str, VideoFacts]) -> pd.DataFrame:
    """One row per question. `videos` says what opening each video gave.

    Columns: row, id, video, question, question_type, answer (as JSON), option_count, duration_s, and the
    checks answer_check, span_check, video_check, duration_check.
    """
    return _frame([row.name for row in rows], _question_columns([row.data for row in rows], videos))


def trace_frame(rows: Sequence[Row], videos: Mapping[str, VideoFacts]) -> pd.DataFrame:
    """One row per trace: its own columns, its question's under `sample.`, and the checks of both."""
    data = [row.data for row in rows]
    samples = [item["sample"] if isinstance(item.get("sample"), dict) else {} for item in data]
    columns = {
        "id": _field(data, "id"),
        "kind": _field(data, "kind"),
        "frame_budget": _integers(_field(data, "frame_budget")),
        "turn_count": _mapped(data, ("turns",), _length),
        "roles_check": _mapped(data, ("kind", "turns"), check_roles),
        "target_check": _mapped(data, ("kind", "turns"), check_targets),
    }
    columns |= {f"sample.{name}": values for name, values in _question_columns(samples, videos).items()}
    whole = [
        item | {"duration_s": _duration(sample), "window_s": item.get("window_s") or ()}
        for item, sample in zip(data, samples, strict=True)
    ]
    if not whole or any(item["duration_s"] is not None for item in whole):
        columns["window_check"] = _mapped(whole, ("kind", "turns", "window_s", "duration_s"), check_windows)
    columns["agreement_check"] = _mapped(data, ("kind", "turns", "sample"), check_agreement)
    return _frame([row.name for row in rows], columns)


def ledger_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per published row and what became of it: `fate_check` is "ok", or why it was set aside."""
    data = [row.data for row in rows]
    fates = [item["reason"] if item["status"] == "set aside" else OK for item in data]
    columns = {name: _field(data, name) for name in ("id", "split", "status")} | {"fate_check": fates}
    return _frame([row.name for row in rows], columns)


@dataclass(frozen=True)
class VideoFacts:
    """What opening a video gave: its duration, or the reason why it cannot be used."""

    duration_s: float | None = None
    problem: str | None = None


def _question_columns(data: Sequence[dict], videos: Mapping[str, VideoFacts]) -> dict[str, Sequence | None]:
    durations = [_duration(item) for item in data]
    whole = [item | {"duration_s": value} for item, value in zip(data, durations, strict=True)]

    def span(question_type: object, answer: object, duration_s: float) -> str:
        return check_span(answer, duration_s) if question_type == "tvg" else OK

    def opened(video: object) -> str:
        facts = videos.get(video) if isinstance(video, str) else None
        return facts.problem or OK if facts else f"{video!r} was not opened"

    def length(video: object, duration_s: float) -> str | None:
        facts = videos.get(video) if isinstance(video, str) else None
        if facts is None or facts.duration_s is None:
            return None
        if abs(facts.duration_s - duration_s) > DURATION_SLACK_S:
            return f"the file lasts {facts.duration_s:.2f} s, the table says {duration_s:.2f} s"
        return OK

    answers = [item | {"options": item.get("options") or ()} for item in data]
    return {
        "id": _field(data, "id"),
        "video": _field(data, "video"),
        "question": _field(data, "question"),
        "question_type": _field(data, "question_type"),
        "answer": _mapped(data, ("answer",), lambda answer: json.dumps(answer, ensure_ascii=False)),
        "option_count": _mapped(answers, ("options",), _length),
        "duration_s": durations if not data or any(value is not None for value in durations) else None,
        "answer_check": _mapped(answers, ("question_type", "answer", "options"), check_answer),
        "span_check": _mapped(whole, ("question_type", "answer", "duration_s"), span),
        "video_check": _mapped(data, ("video",), opened),
        "duration_check": _mapped(whole, ("video", "duration_s"), length),
    }


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple)) else None


def _duration(sample: dict) -> float | None:
    meta = sample.get("meta")
    value = meta.get("duration_s") if isinstance(meta, dict) else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def _field(data: Sequence[dict], name: str) -> list | None:
    """The values of a field, None where a row lacks it; None for the whole if no row has it."""
    return [item.get(name) for item in data] if not data or any(name in item for item in data) else None


def _mapped(data: Sequence[dict], names: Sequence[str], function: Callable[..., Any]) -> list | None:
    """`function` of the named fields, None where one is null; None for the whole if a field is missing."""
    columns = [_field(data, name) for name in names]
    if any(column is None for column in columns):
        return None
    rows = zip(*columns, strict=True)
    return [None if any(value is None for value in row) else function(*row) for row in rows]


def _integers(values: list | None) -> Sequence | None:
    """Values as a nullable integer column if all are whole numbers or null, else as they are.

    A plain column would turn into floats at the first null, and a type check would blame the wrong thing.
    """
    import pandas as pd

    if values is not None and all(v is None or type(v) is int for v in values):
        return pd.array(values, dtype="Int64")
    return values


def _frame(names: list[str], columns: Mapping[str, Sequence | None]) -> pd.DataFrame:
    import pandas as pd

    kept = {name: values for name, values in columns.items() if values is not None}
    return pd.DataFrame({"row": names} | kept)
