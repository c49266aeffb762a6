"""From results to figures: two accuracies, their interval, and what became of the questions.

    strict    sum of scores / all questions       failed, skipped and unparsed ones count as 0
    answered  sum of scores / answered questions  says how good the answers are that were given

Both are shown wherever one is. The interval is that of the strict one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import bootstrap_interval

STATES = ("answered", "unparsed", "failed", "skipped")


def strict_scores(results: Sequence[Result]) -> list[float]:
    """One value per question, 0 where there is no score."""
    return [result.score if result.status == "answered" else 0.0 for result in results]


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many questions ended in each state, and how many there were."""
    states = Counter(result.status for result in results)
    return {state: states[state] for state in STATES} | {"asked": len(results)}


def error_share(results: Sequence[Result]) -> float:
    """Share of the questions that failed or were skipped; 1.0 if none was asked."""
    lost = sum(result.status in ("failed", "skipped") for result in results)
    return lost / len(results) if results else 1.0


def reasons(results: Sequence[Result]) -> dict[str, int]:
    """How often each reason was given, failures and skips only, most frequent first."""
    found = Counter(r.reason or "no reason" for r in results if r.status in ("failed", "skipped"))
    return dict(found.most_common())


def accuracy(results: Sequence[Result], seed: int = 0) -> dict:
    """`strict` with its limits `low` and `high`, `answered`, and `n`; None where nothing was asked."""
    interval = bootstrap_interval(strict_scores(results), seed=seed)
    answered = [result.score for result in results if result.status == "answered"]
    given = round(sum(answered) / len(answered), 10) if answered else None
    data = interval.to_json()
    return {
        "strict": data["mean"],
        "low": data["low"],
        "high": data["high"],
        "answered": given,
        "n": data["n"],
    }


def accuracy_table(results: Sequence[Result], seed: int = 0) -> dict[str, dict[str, dict]]:
    """Accuracy by frame budget and question type, `all` first: {"k4": {"all": ..., "mcq": ...}}."""
    table: dict[str, dict[str, dict]] = {}
    for budget in sorted({result.budget for result in results}):
        rows = [result for result in results if result.budget == budget]
        kinds = sorted({result.question_type for result in rows})
        parts = {"all": rows} | {kind: [r for r in rows if r.question_type == kind] for kind in kinds}
        table[f"k{budget}"] = {name: accuracy(part, seed) for name, part in parts.items()}
    return table


def behaviour(results: Sequence[Result], seed: int = 0) -> dict:
    """Format compliance and mean format reward (with limits), and executed tool calls per episode.

    Over the episodes that ran: a failed one has no format to judge, nor has one that was not asked to think.
    """
    ran = [result for result in results if result.status in ("answered", "unparsed")]
    formed = [result for result in ran if result.compliant is not None and result.format is not None]
    return {
        "compliance": bootstrap_interval([float(r.compliant) for r in formed], seed=seed).to_json(),
        "format": bootstrap_interval([r.format for r in formed], seed=seed).to_json(),
        "tool_calls": bootstrap_interval([float(r.calls or 0) for r in ran], seed=seed).to_json(),
    }


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
