"""What became of each question, and the file that keeps it.

Every question ends in exactly one state:

    answered   an answer was read; it has a score
    unparsed   the episode ended, but no answer can be read from it; it counts as 0
    failed     something went wrong while it was asked; the reason says what
    skipped    it could not be asked; the reason says why

A key is a hash of everything that was asked. The store keeps finished states only (answered, unparsed):
failures are asked again on resume, answers are not.
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


@dataclass(frozen=True)
class Result:
    """One question at one frame budget and temperature. Holds no times: equal runs give equal lines.

    `score` is in [0, 1], None for failed and skipped. `format` is the format reward; `calls` counts
    executed calls; `compliant` is the format compliance of the whole episode.
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

    def to_json(self) -> dict:
        return asdict(self)

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
    over and counted in `unreadable`. Each append is on disk when it returns.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.unreadable = 0
        self._results: dict[str, Result] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Result | None:
        return self._results.get(key)

    def append(self, results: Iterable[Result]) -> None:
        """Write the finished ones among `results`; failed and skipped ones are not kept."""
        kept = [result for result in results if result.status in FINISHED]
        with open(self.path, "a", encoding="utf-8") as file:
            for result in kept:
                file.write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._results.update((result.key, result) for result in kept)

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            try:
                result = Result.from_json(json.loads(line))
            except (ValueError, TypeError):
                self.unreadable += 1
                continue
            self._results[result.key] = result
        if self.unreadable:
            log.warning(
                "%s: %d lines cannot be read; their questions are asked again", self.path, self.unreadable
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
