"""What became of each question, and the file that keeps it.

Every question ends in exactly one state:

    answered   an answer was read; it has a score
    unparsed   the episode ended, but no answer can be read from it; it counts as 0
    failed     something went wrong while it was asked; the reason says what
    skipped    it could not be asked; the reason says why

A key is a hash of everything that was asked. The store keeps finished states (answered, unparsed), and
answers whose judge was away: on resume failures are asked again, answers are not, and the judge alone is
asked again where only its verdict is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Literal

log = logging.getLogger("paravt")

FINISHED = ("answered", "unparsed")
OPTIONAL = ("question", "groups", "tools")
UNJUDGED = "no verdict: "  # how the reason begins of an answer that waits for its judge


@dataclass(frozen=True)
class Result:
    """One question at one frame budget and temperature. Holds no times: equal runs give equal lines.

    `score` is in [0, 1], None for failed and skipped. `format` is the format reward; `calls` counts
    executed calls; `compliant` is the format compliance of the whole episode.

    The last three are for benchmarks that are broken down: `question` is a hash of the question alone, so
    that two runs can be paired; `groups` say which parts of the benchmark it belongs to; `tools` counts turns
    and calls by what came of them.
    """

    key: str
    id: str
    question_type: str
    budget: int
    temperature: float
    status: Literal["answered", "unparsed", "failed", "skipped"]
    reason: str | None = None
    score: float | None = None
    answer: str | None = None
    stop_reason: str | None = None
    compliant: bool | None = None
    format: float | None = None
    calls: int | None = None
    frames_seen: int | None = None
    question: str | None = None
    groups: dict[str, str | list[str]] | None = None
    tools: dict[str, int] | None = None

    def to_json(self) -> dict:
        data = asdict(self)
        return {key: value for key, value in data.items() if value is not None or key not in OPTIONAL}

    @classmethod
    def from_json(cls, data: dict) -> Result:
        return cls(**data)


def canonical_hash(value: object) -> str:
    """The first 32 hex digits of SHA-256 over canonical JSON: equal values, equal hash, in every process."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class ResultStore:
    """Append-only jsonl file of finished results by key.

    A line that was cut by a kill is removed when the file is opened; a line that cannot be read is passed
    over and counted in `unreadable`. Each append is on disk when it returns. `others` are read as well and
    never written: they belong to other shards, which may be writing them.
    """

    def __init__(self, path: str | Path, others: Iterable[Path] = ()) -> None:
        self.path = Path(path)
        self.unreadable = 0
        self._results: dict[str, Result] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for other in others:
            self._take(other, other.read_bytes())
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(self.path, whole)
            self._take(self.path, content)

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Result | None:
        return self._results.get(key)

    def append(self, results: Iterable[Result]) -> None:
        """Write the ones among `results` that need no other answer; failed and skipped ones are not kept."""
        kept = [result for result in results if result.status in FINISHED or unjudged(result)]
        with open(self.path, "a", encoding="utf-8") as file:
            for result in kept:
                file.write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._results.update((result.key, result) for result in kept)

    def _take(self, path: Path, content: bytes) -> None:
        """Know the whole lines of a store; a last line without an end is being written, or was cut."""
        unreadable = 0
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            try:
                result = Result.from_json(json.loads(line))
            except (ValueError, TypeError):
                unreadable += 1
                continue
            known = self._results.get(result.key)
            if known is None or unjudged(known):
                self._results[result.key] = result
        if unreadable:
            log.warning("%s: %d lines cannot be read; their questions are asked again", path, unreadable)
        self.unreadable += unreadable


def unjudged(result: Result) -> bool:
    """Whether an answer was given and only the judge's verdict on it is missing."""
    return (
        result.status == "failed" and result.answer is not None and (result.reason or "").startswith(UNJUDGED)
    )


def write_results(path: str | Path, results: Iterable[Result]) -> None:
    """One JSON object a line, in the order given."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(result.to_json(), ensure_ascii=False) + "\n" for result in results)


def read_results(path: str | Path) -> list[Result]:
    """The results of a finished run. Raises ValueError naming the first line that is not one."""
    results = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                results.append(Result.from_json(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a result ({error})") from error
    return results
