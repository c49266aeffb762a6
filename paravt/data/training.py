"""The published training tables as ours: SFT traces and RL questions, each row accounted for.

    sft_rows       -> traces, with what became of each row
    rl_questions   -> Samples, with what became of each row

A row is used, or set aside with a reason; the counts by split and reason add up to the rows of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paravt.data.conversion import Rules, convert, inside
from paravt.data.media import media_path
from paravt.data.questions import rl_sample
from paravt.data.schema import Row, TraceRow, VideoFacts
from paravt.data.sentinel import Resolver, RowError, videos_of
from paravt.data.tables import Table, read_table
from paravt.rollout import Sample

SET_ASIDE = "set aside"


@dataclass(frozen=True)
class Fate:
    """What became of one published row. `row` names it for a person."""

    row: str
    split: str
    status: str
    reason: str = ""


@dataclass
class Ledger:
    """The fates of all rows of a table, in order."""

    fates: list[Fate] = field(default_factory=list)
    merged: int = 0

    def to_json(self) -> dict[str, Any]:
        """Counts by split and status, reasons by count, and how many calls joined an earlier turn."""
        splits: dict[str, Counter[str]] = {}
        for fate in self.fates:
            splits.setdefault(fate.split, Counter())[fate.status] += 1
        reasons = Counter(fate.reason for fate in self.fates if fate.status == SET_ASIDE)
        return {
            "rows": len(self.fates),
            "splits": {name: dict(sorted(counts.items())) for name, counts in sorted(splits.items())},
            "set_aside": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
            "calls_merged": self.merged,
        }


def ledger_rows(ledger: Ledger) -> list[Row]:
    """The fates as rows of a table."""
    return [
        Row(number, {"id": fate.row, "split": fate.split, "status": fate.status, "reason": fate.reason})
        for number, fate in enumerate(ledger.fates, 1)
    ]


def sft_rows(
    tables: Sequence[Table],
    limit: int | None,
    resolver: Resolver,
    repository: str,
    facts: Mapping[str, VideoFacts],
    rules: Rules,
) -> tuple[list[TraceRow], Ledger]:
    """The traces of the SFT tables. `facts` are by path under the repository's media folder."""
    ledger, traces = Ledger(), []
    facts_of, video_of = _lookups(facts, repository)
    for table in tables:
        for name, row in read_table(table, limit):
            outcome = convert(row, name, table.split, resolver.find, video_of, facts_of, rules)
            ledger.fates.append(Fate(_named(name, row), table.split, outcome.status, outcome.reason))
            ledger.merged += outcome.merged
            if outcome.trace:
                traces.append(outcome.trace)
    return traces, ledger


def rl_questions(
    tables: Sequence[Table],
    limit: int | None,
    resolver: Resolver,
    repository: str,
    facts: Mapping[str, VideoFacts],
) -> tuple[list[Sample], Ledger]:
    """The questions of the RL tables."""
    ledger, samples = Ledger(), []
    facts_of, video_of = _lookups(facts, repository)
    for table in tables:
        for name, row in read_table(table, limit):
            source = str(row.get("data_source") or table.split)
            try:
                sample = rl_sample(row, name, resolver.find, video_of)
                known = facts_of(resolver.find(videos_of(row)[0]))
                samples.append(_timed(sample, known))
            except RowError as error:
                ledger.fates.append(Fate(_named(name, row), source, SET_ASIDE, str(error)))
                continue
            ledger.fates.append(Fate(_named(name, row), source, "passed"))
    return samples, ledger


def _timed(sample: Sample, facts: VideoFacts) -> Sample:
    """The question with its video's duration; its span cut to the video. Raises RowError."""
    if facts.problem or facts.duration_s is None:
        raise RowError(f"its video cannot be used ({(facts.problem or 'no duration').partition(':')[0]})")
    answer = sample.answer
    if sample.question_type == "tvg" and not isinstance(answer, str):
        answer = inside(answer, facts.duration_s)
    return replace(sample, answer=answer, meta=sample.meta | {"duration_s": facts.duration_s})


def _lookups(
    facts: Mapping[str, VideoFacts], repository: str
) -> tuple[Callable[[str], VideoFacts], Callable[[str], str]]:
    missing = VideoFacts(problem="missing")
    return (lambda path: facts.get(path, missing)), (lambda path: media_path(repository, path))


def _named(name: str, row: Mapping[str, Any]) -> str:
    identity = row.get("id")
    return f"{name} ({identity})" if isinstance(identity, str | int) else name
