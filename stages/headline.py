"""The few figures by which runs are compared, under the same names in every run.

    result/accuracy            strict greedy accuracy, mean over frame budgets
    result/accuracy_k4         the same at one frame budget
    result/accuracy_mcq        the same for one type of question
    result/compliance_t1       format compliance at that temperature
    result/format_reward_t1    mean format reward f_tau at that temperature
    result/tool_calls          executed calls per episode, greedy
    result/error_share         questions that failed or were skipped

They stand on evaluation runs, on runs of the study and on the pipeline's run, so that a chart or a column of
the runs table holds all arms and seeds. `dvc metrics` and `dvc exp` show them too, as `accuracy` and so on.
Shares are from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paravt.benchmarks.results import FINISHED, Result
from paravt.benchmarks.summary import error_share, strict_scores

PREFIX = "result/"
TABLE = "evaluation/questions.json"
COLUMNS = (
    "id",
    "question_type",
    "budget",
    "temperature",
    "status",
    "score",
    "answer",
    "calls",
    "compliant",
    "format",
    "frames_seen",
    "reason",
)


def headline(results: Sequence[Result]) -> dict[str, float | None]:
    """The figures of one evaluated model; None where nothing was asked."""
    greedy = [result for result in results if not result.temperature]
    found = {"accuracy": _mean(strict_scores(greedy))}
    for budget in sorted({result.budget for result in greedy}):
        found[f"accuracy_k{budget}"] = _mean(strict_scores([r for r in greedy if r.budget == budget]))
    for kind in sorted({result.question_type for result in greedy}):
        found[f"accuracy_{kind}"] = _mean(strict_scores([r for r in greedy if r.question_type == kind]))
    for temperature in sorted({result.temperature for result in results} - {0.0}):
        ran = [r for r in results if r.temperature == temperature and r.status in FINISHED]
        found[f"compliance_t{temperature:g}"] = _mean(r.compliant for r in ran if r.compliant is not None)
        found[f"format_reward_t{temperature:g}"] = _mean(r.format for r in ran if r.format is not None)
    found["tool_calls"] = _mean(result.calls or 0 for result in greedy if result.status in FINISHED)
    found["error_share"] = error_share(results)
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def bare(figures: Mapping[str, float | None]) -> dict[str, float]:
    """headline.json: those of `figures` that are known, under names without the prefix."""
    known = {name: value for name, value in figures.items() if value is not None}
    return {name.removeprefix(PREFIX): round(value, 6) for name, value in known.items()}


def table(results: Sequence[Result]) -> list[list]:
    """A row per question as it was asked: the values of COLUMNS."""
    return [[getattr(result, name) for name in COLUMNS] for result in results]


def _mean(values: Iterable[float]) -> float | None:
    known = [float(value) for value in values]
    return sum(known) / len(known) if known else None
