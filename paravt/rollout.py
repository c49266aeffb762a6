"""The records that travel between rooms: a question, a parsed turn, an executed call, a whole episode.

No torch here: data stages, scoring and reports read these without it. Everything can be written as one JSON
line and read back; frames are written as file and time, never as pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
import json
from pathlib import Path
from typing import Any, Literal

from paravt.conversation import Conversation

QuestionType = Literal["mcq", "tvg", "oe"]
StopReason = Literal["answered", "no_answer", "truncated", "failed"]
LETTERS = "ABCDEFGHIJ"


class SampleError(ValueError):
    """A question that cannot be asked; the message names the sample and what is wrong."""


@dataclass(frozen=True)
class Sample:
    """One question about one video.

    `answer` is a letter for mcq, (start_s, end_s) for tvg (temporal grounding), a text for oe (open-ended).
    Raises SampleError if the answer does not fit its type, or there are more options than letters.
    """

    id: str
    video: str
    question: str
    answer: str | tuple[float, float]
    question_type: QuestionType
    options: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if len(self.options) > len(LETTERS):
            raise SampleError(
                f"sample {self.id}: {len(self.options)} options; at most {len(LETTERS)} have a letter"
            )
        if self.question_type == "mcq":
            allowed = LETTERS[: len(self.options)]
            if not (isinstance(self.answer, str) and len(self.answer) == 1 and self.answer in allowed):
                raise SampleError(
                    f"sample {self.id}: answer {self.answer!r} is not a letter of its "
                    f"{len(self.options)} options"
                )
        elif self.question_type == "tvg":
            if isinstance(self.answer, str) or len(self.answer) != 2 or not self.answer[0] <= self.answer[1]:
                raise SampleError(f"sample {self.id}: answer {self.answer!r} is not a span (start_s, end_s)")
            object.__setattr__(self, "answer", (float(self.answer[0]), float(self.answer[1])))
        elif self.question_type != "oe":
            raise SampleError(f"sample {self.id}: question_type {self.question_type!r}; use mcq, tvg or oe")

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Sample:
        answer = data["answer"]
        return cls(
            id=data["id"],
            video=data["video"],
            question=data["question"],
            answer=answer if isinstance(answer, str) else tuple(answer),
            question_type=data["question_type"],
            options=tuple(data.get("options") or ()),
            meta=dict(data.get("meta") or {}),
        )


@dataclass(frozen=True)
class ToolCall:
    """A call that can be run; `style` is the syntax it used.

    `arguments` hold the values as the model wrote them; `start` and `end` are renamed to the schema's names.
    """

    name: str
    arguments: dict[str, Any]
    style: Literal["json", "python"] = "json"


@dataclass(frozen=True)
class ToolError:
    """A call that cannot be run; `message` goes back to the model in the call's place.

    `kind` is the status its execution gets: the call could not be read, or the turn had too many.
    """

    message: str
    kind: Literal["malformed", "over_cap"] = "malformed"


@dataclass(frozen=True)
class Turn:
    """What one assistant turn says, by the grammar of `paravt.protocol.parse_turn`.

    `calls` has one entry per call begun, in order. `answer` is the text of the last answer block, None if the
    turn holds none or begins a call (a call beats an answer). `answers` has the text of each block.
    The flags say which structural sites were closed; they are what the format reward reads. `calls_closed`
    and `answer_closed` mean that each block of the kind has both of its tags.
    """

    think: str | None
    calls: tuple[ToolCall | ToolError, ...]
    answer: str | None
    think_opened: bool = False
    think_closed: bool = False
    calls_closed: bool = True
    answer_opened: bool = False
    answer_closed: bool = False
    answers: tuple[str, ...] = ()

    @property
    def valid_calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for call in self.calls if isinstance(call, ToolCall))

    @property
    def well_formed(self) -> bool:
        """A closed think that says something, and either only valid closed calls or exactly one non-empty
        closed answer.
        """
        if not (self.think_opened and self.think_closed and self.think and self.think.strip()):
            return False
        if self.calls:
            return self.calls_closed and len(self.valid_calls) == len(self.calls) and not self.answer_opened
        return self.answer_closed and len(self.answers) == 1 and bool(self.answer and self.answer.strip())


@dataclass(frozen=True)
class Execution:
    """One call of a turn and what came of it, in call order. Only `status == "ok"` really ran.

    `clamped` means that the window was cut to the video; the report says so too.
    """

    call: ToolCall | ToolError
    status: Literal["ok", "error", "malformed", "over_cap"]
    report: str
    window_s: tuple[float, float] | None = None
    times_s: tuple[float, ...] = ()
    clamped: bool = False
    truncated: bool = False
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class EpisodeTurn:
    """One assistant turn of an episode. `text` is the whole turn, the forced prefix included.

    `span` is (first, end) of the sampled tokens in the main conversation; `finish_reason` is the engine's.
    """

    text: str
    parsed: Turn
    executions: tuple[Execution, ...] = ()
    forced_answer: bool = False
    span: tuple[int, int] = (0, 0)
    finish_reason: Literal["stop", "length"] = "stop"


@dataclass
class Rollout:
    """One finished episode: what was read, written, run and answered."""

    sample_id: str
    turns: list[EpisodeTurn]
    main: Conversation
    subagents: list[Conversation]
    answer: str | None
    stop_reason: StopReason
    frame_budget: int
    frames_seen: int = 0
    weight_versions: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def executions(self) -> list[Execution]:
        return [execution for turn in self.turns for execution in turn.executions]

    @property
    def call_count(self) -> int:
        """Calls that really ran."""
        return sum(execution.status == "ok" for execution in self.executions)

    @property
    def frames_read(self) -> int:
        """Frames that were decoded for the episode: the overview and all crops that ran."""
        return self.frames_seen + sum(len(execution.times_s) for execution in self.executions)

    @property
    def tokens_written(self) -> int:
        """Tokens that were sampled for the episode, by its sub-agents too."""
        return self.main.sampled_count + sum(report.sampled_count for report in self.subagents)

    @property
    def compliant(self) -> bool:
        """Format compliance of the whole episode: each turn well formed and the last one an answer."""
        return (
            bool(self.turns)
            and all(turn.parsed.well_formed for turn in self.turns)
            and not self.turns[-1].parsed.calls
        )

    def to_json(self) -> dict:
        data = {key: value for key, value in vars(self).items() if key not in ("turns", "main", "subagents")}
        return data | {
            "turns": [asdict(turn) for turn in self.turns],
            "main": self.main.to_json(),
            "subagents": [conversation.to_json() for conversation in self.subagents],
        }

    @classmethod
    def from_json(cls, data: dict) -> Rollout:
        fields = {key: value for key, value in data.items() if key not in ("sample", "model")}
        fields["turns"] = [_turn_from_json(turn) for turn in data["turns"]]
        fields["main"] = Conversation.from_json(data["main"])
        fields["subagents"] = [Conversation.from_json(item) for item in data["subagents"]]
        fields["weight_versions"] = tuple(data["weight_versions"])
        return cls(**fields)


@dataclass(frozen=True)
class EpisodeRow:
    """An episode in a file with what is needed to reward and to read it: its question, and the folder of the
    model that wrote it (for the tokenizer). A file of bare rollouts has neither.
    """

    rollout: Rollout
    sample: Sample | None = None
    model: str | None = None

    def to_json(self) -> dict:
        sample = self.sample.to_json() if self.sample else None
        return self.rollout.to_json() | {"sample": sample, "model": self.model}

    @classmethod
    def from_json(cls, data: dict) -> EpisodeRow:
        sample = Sample.from_json(data["sample"]) if data.get("sample") else None
        return cls(Rollout.from_json(data), sample, data.get("model"))


def _call_from_json(data: dict) -> ToolCall | ToolError:
    return ToolError(**data) if "message" in data else ToolCall(**data)


def _turn_from_json(data: dict) -> EpisodeTurn:
    parsed = dict(data["parsed"])
    parsed["calls"] = tuple(_call_from_json(call) for call in parsed["calls"])
    parsed["answers"] = tuple(parsed["answers"])
    executions = []
    for item in data["executions"]:
        item = dict(item)
        item["call"] = _call_from_json(item["call"])
        item["window_s"] = tuple(item["window_s"]) if item["window_s"] else None
        item["times_s"] = tuple(item["times_s"])
        executions.append(Execution(**item))
    return EpisodeTurn(
        **(data | {"parsed": Turn(**parsed), "executions": tuple(executions), "span": tuple(data["span"])})
    )


def write_jsonl(path: str | Path, records: Iterable[Sample | Rollout | EpisodeRow]) -> None:
    """One JSON object a line, keys in record order, UTF-8."""
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")


def read_samples(path: str | Path) -> list[Sample]:
    return [Sample.from_json(row) for row in _read_lines(path)]


def read_episodes(path: str | Path) -> Iterator[EpisodeRow]:
    return (EpisodeRow.from_json(row) for row in _read_lines(path))


def _read_lines(path: str | Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object ({error.msg})") from error
