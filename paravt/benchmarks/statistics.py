"""How sure a score is: 95 % bootstrap intervals, and paired bootstraps over questions and seeds.

    interval     mean of x*, x* = questions drawn again with replacement
    difference   mean of (b - a)*, where questions, and seeds when there are several, are drawn again;
                 a question's two scores stay together, so what makes it hard cancels

The limits are the 2.5 and 97.5 percentiles of the redrawn means. Everything is seeded: the same scores give
the same limits in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 10_000
CHUNK = 500  # resamples worked on at once


@dataclass(frozen=True)
class Interval:
    """A mean over `n` questions (and seeds) with its limits; all None if there is nothing to average."""

    mean: float | None
    low: float | None
    high: float | None
    n: int

    def to_json(self) -> dict:
        return {key: _rounded(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Difference:
    """Second minus first over the same questions, with its limits and its value in each seed."""

    mean: float
    low: float
    high: float
    questions: int
    by_seed: tuple[float, ...]

    @property
    def clear(self) -> bool:
        """The interval excludes 0 and each seed has the sign of the mean."""
        beyond = self.low > 0 or self.high < 0
        return beyond and all(value * self.mean > 0 for value in self.by_seed)

    def to_json(self) -> dict:
        data = {key: _rounded(value) for key, value in asdict(self).items() if key != "by_seed"}
        return data | {"by_seed": [_rounded(value) for value in self.by_seed], "clear": self.clear}


def bootstrap_interval(
    values: ArrayLike, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of `values` and its limits. They are [questions], or [seeds, questions]: both are redrawn.

    Raises ValueError if a value is not finite. A score that could not be computed is no number: the caller
    says what it counts as, or leaves it out.
    """
    scores = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if scores.ndim != 2:
        raise ValueError(f"scores of shape {scores.shape}; one value per seed and question is needed")
    _refuse_missing(scores)
    if scores.size == 0:
        return Interval(None, None, None, 0)
    low, high = _limits(_resampled_means(scores, resamples, seed), level)
    return Interval(float(scores.mean()), low, high, scores.shape[1])


def macro_interval(
    groups: Sequence[ArrayLike], level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean over groups of each group's mean; questions are redrawn within their group, groups are not.

    Empty groups are left out. Raises ValueError if a value is not finite.
    """
    scores = [np.atleast_2d(np.asarray(group, dtype=np.float64)) for group in groups if len(group)]
    _refuse_missing(*scores)
    if not scores:
        return Interval(None, None, None, 0)
    # a seed of its own for each group: groups of one size would be redrawn alike
    means = [_resampled_means(part, resamples, seed + 2 * place) for place, part in enumerate(scores)]
    low, high = _limits(np.mean(means, axis=0), level)
    mean = float(np.mean([part.mean() for part in scores]))
    return Interval(mean, low, high, sum(part.size for part in scores))


def paired_difference(
    first: ArrayLike, second: ArrayLike, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Second minus first. Both are [questions], or [seeds, questions] with the same questions in each row.

    With several seeds, seeds and questions are redrawn independently of each other, so the limits answer for
    another training run and for other questions. Raises ValueError if the shapes differ, are empty, or a
    value is not finite.
    """
    a, b = np.atleast_2d(np.asarray(first, np.float64)), np.atleast_2d(np.asarray(second, np.float64))
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise ValueError(f"scores of shapes {a.shape} and {b.shape}; the same seeds and questions are needed")
    _refuse_missing(a, b)
    gaps = b - a
    low, high = _limits(_resampled_means(gaps, resamples, seed), level)
    return Difference(
        float(gaps.mean()), low, high, gaps.shape[1], tuple(float(v) for v in gaps.mean(axis=1))
    )


def _resampled_means(scores: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means float64 [resamples] of `scores` [seeds, questions] with both axes redrawn."""
    seeds, questions = scores.shape
    by_question = _draws(questions, resamples, seed)
    by_seed = _draws(seeds, resamples, seed + 1)
    means = []
    for start in range(0, resamples, CHUNK):
        part = slice(start, start + CHUNK)
        sums = by_question[part].astype(np.float64) @ scores.T  # [chunk, seeds]
        means.append((sums * by_seed[part]).sum(axis=1) / (seeds * questions))
    return np.concatenate(means)


@lru_cache(maxsize=8)
def _draws(count: int, resamples: int, seed: int) -> np.ndarray:
    """How often each of `count` things was drawn in each resample: uint16 [resamples, count].

    Drawing with replacement is the same as these weights. They are kept: a report asks for many intervals
    over the same number of questions.
    """
    rng = np.random.default_rng((seed, count))
    chunks = [
        rng.multinomial(count, np.full(count, 1 / count), size=min(CHUNK, resamples - start)).astype(
            np.uint16
        )
        for start in range(0, resamples, CHUNK)
    ]
    return np.concatenate(chunks)


def _limits(means: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _refuse_missing(*arrays: np.ndarray) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("a score is missing or not finite; leave it out or say what it counts as")


def _rounded(value: float | int | None) -> float | int | None:
    """Ten digits: beyond them machines may differ, and a result file must not."""
    return round(value, 10) if isinstance(value, float) else value
