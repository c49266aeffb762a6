"""A benchmark is a name, a way to load its questions, a metric, and what its figures are broken down by.

    load(place) -> Questions        metric(sample, rollout, reward) -> score in [0, 1], or None if not scored
    skip(sample) -> reason or None  a question that cannot be asked at all

Answers are read and scored by the readers that rewards use: a reply cannot be right here and wrong there.
A new benchmark is one file that registers one of these; `docs/benchmarks.md` shows how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paravt.rewards import Reward
from paravt.rollout import Rollout, Sample


def estimate_tokens(text: str) -> int:
    """Tokens of a text where no tokenizer is at hand: a third of its UTF-8 bytes, rounded up; English has
    fewer.
    """
    return -(-len(text.encode("utf-8", "replace")) // 3)


@dataclass(frozen=True)
class Place:
    """Where the questions are, and the options that shape them.

    `tables` holds owner__name/path for each repository, `media` likewise; `needles` is the folder of
    prepared tables. `open_ended` says what becomes of the open questions of a mixed benchmark.
    """

    tables: Path = Path("data/hub")
    media: Path = Path("data/media")
    needles: Path = Path("data/prepared")
    open_ended: Literal["score", "leave_out"] = "score"
    subtitle_tokens: int = 8192
    count_tokens: Callable[[str], int] = field(default=estimate_tokens, compare=False)


@dataclass
class Questions:
    """Questions in table order. `set_aside` names rows that are no question (bad gold, left out), with why;
    `rows` counts the rows of the table.
    """

    samples: list[Sample]
    rows: int
    set_aside: dict[str, str] = field(default_factory=dict)


def accuracy(sample: Sample, rollout: Rollout, reward: Reward) -> float | None:
    """Right or wrong for choices, temporal IoU for spans, the configured text score for open answers."""
    return reward.accuracy


def never(sample: Sample) -> str | None:
    """Every question can be asked."""
    return None


@dataclass(frozen=True)
class Benchmark:
    """One set of questions and how they are scored.

    `by` names the entries of `Sample.meta` that figures are broken down by; `macro` is the one whose groups
    are averaged with equal weight. `headline` is the part that the published figure is over. `published_rows`
    is the size of the published table.
    """

    name: str
    load: Callable[[Place], Questions]
    metric: Callable[[Sample, Rollout, Reward], float | None] = accuracy
    skip: Callable[[Sample], str | None] = never
    by: tuple[str, ...] = ()
    macro: str | None = None
    headline: Literal["all", "mcq"] = "all"
    published_rows: int | None = None


_BENCHMARKS: dict[str, Benchmark] = {}


def register(benchmark: Benchmark) -> Benchmark:
    """Make a benchmark known by its name. Raises ValueError if the name is taken."""
    if benchmark.name in _BENCHMARKS:
        raise ValueError(f"a benchmark called {benchmark.name!r} is registered already")
    _BENCHMARKS[benchmark.name] = benchmark
    return benchmark


def get(name: str) -> Benchmark:
    """The benchmark of that name. Raises ValueError that lists the known ones."""
    if name not in _BENCHMARKS:
        raise ValueError(f"no benchmark is called {name!r}; use one of {', '.join(names())}")
    return _BENCHMARKS[name]


def names() -> list[str]:
    return sorted(_BENCHMARKS)
