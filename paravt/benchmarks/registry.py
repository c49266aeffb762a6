"""A benchmark is a name, a way to load its questions, and a metric.

    load(folder) -> samples         metric(sample, rollout, reward) -> score in [0, 1], or None if not scored
    skip(sample) -> reason or None  a question that cannot be asked at all

Answers are read and scored by the readers that rewards use: a reply cannot be right here and wrong there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paravt.rewards import Reward
from paravt.rollout import Rollout, Sample


def accuracy(sample: Sample, rollout: Rollout, reward: Reward) -> float | None:
    """Right or wrong for choices, temporal IoU for spans, the configured text score for open answers."""
    return reward.accuracy


def never(sample: Sample) -> str | None:
    """Every question can be asked."""
    return None


@dataclass(frozen=True)
class Benchmark:
    """One set of questions and how they are scored."""

    name: str
    load: Callable[[Path], list[Sample]]
    metric: Callable[[Sample, Rollout, Reward], float | None] = accuracy
    skip: Callable[[Sample], str | None] = never


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
