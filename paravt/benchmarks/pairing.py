"""Two runs on the same questions: the difference of their scores, and how sure it is.

    difference = mean over common questions of (second - first), a bootstrap over questions for the limits

A question is the same if text, options, gold answer and video are. Those that only one run has, or that
differ, are counted and left out: a difference over other questions would compare the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import Difference, paired_difference
from paravt.benchmarks.summary import strict_scores


@dataclass(frozen=True)
class Pairing:
    """`better` and `worse` count questions on which the second run scores more, or less."""

    difference: Difference | None
    first_mean: float | None
    second_mean: float | None
    better: int
    worse: int
    equal: int
    only_first: int
    only_second: int
    changed: int

    def to_json(self) -> dict[str, Any]:
        data = {key: value for key, value in vars(self).items() if key != "difference"}
        for key in ("first_mean", "second_mean"):
            data[key] = None if data[key] is None else round(data[key], 10)
        return data | {"difference": self.difference.to_json() if self.difference else None}


def pair(first: Sequence[Result], second: Sequence[Result]) -> Pairing:
    """Compare strict scores question by question. Raises ValueError if a run holds a question twice."""
    a, b = _by_question(first), _by_question(second)
    common = [key for key in a if key in b]
    changed = {key for key in common if a[key].question != b[key].question}
    same = [key for key in common if key not in changed]
    one, two = strict_scores([a[key] for key in same]), strict_scores([b[key] for key in same])
    return Pairing(
        difference=paired_difference(one, two) if same else None,
        first_mean=sum(one) / len(one) if one else None,
        second_mean=sum(two) / len(two) if two else None,
        better=sum(y > x for x, y in zip(one, two, strict=True)),
        worse=sum(y < x for x, y in zip(one, two, strict=True)),
        equal=sum(y == x for x, y in zip(one, two, strict=True)),
        only_first=len(a) - len(common),
        only_second=len(b) - len(common),
        changed=len(changed),
    )


def _by_question(results: Sequence[Result]) -> dict[str, Result]:
    """By id: budgets and temperatures may differ between the runs, that is what is compared."""
    found = {result.id: result for result in results}
    if len(found) != len(results):
        raise ValueError("a run holds a question twice; compare runs of one budget and one temperature")
    return found


def pairing_line(name: str, pairing: Pairing) -> str:
    """One line for a person."""
    if pairing.difference is None:
        return f"{name}: no question in common"
    gap = pairing.difference
    verdict = "clear" if gap.clear else "not clear"
    words = (
        f"{name}: {100 * pairing.first_mean:.1f} -> {100 * pairing.second_mean:.1f}, difference "
        f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f}, {verdict}) over "
        f"{gap.questions} questions: {pairing.better} better, {pairing.worse} worse, {pairing.equal} equal"
    )
    left = [
        f"{count} {what}"
        for count, what in (
            (pairing.only_first, "only in the first"),
            (pairing.only_second, "only in the second"),
            (pairing.changed, "not the same question"),
        )
        if count
    ]
    return f"{words}; left out: {', '.join(left)}" if left else words
