"""What a finished benchmark says: its headline, its parts, how the tool was used, what was lost and why.

    accuracy   strict over all questions, answered over those that were answered; both always together
    mIoU       the same number where the questions are spans of time: the mean temporal IoU
    R@m        share of all span questions whose IoU is m or more
    macro      mean over groups of the group's strict accuracy, each group counted once

A question of several groups counts in each. Values are shares from 0 to 1; equal results give equal figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paravt.benchmarks.registry import Benchmark, Questions
from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import macro_interval
from paravt.benchmarks.summary import accuracy, counts, error_share, percent, reasons, strict_scores

RECALLS = (0.3, 0.5, 0.7)
NAMED_REASONS = 10


def describe(
    benchmark: Benchmark, results: Sequence[Result], questions: Questions | None = None
) -> dict[str, Any]:
    """All figures of one benchmark as a JSON object."""
    headline = [r for r in results if benchmark.headline == "all" or r.question_type == benchmark.headline]
    spans = [result for result in results if result.question_type == "tvg"]
    only_spans = bool(spans) and len(spans) == len(results)
    found: dict[str, Any] = {
        "benchmark": benchmark.name,
        "measure": "mIoU" if only_spans else "accuracy",
        "over": "all questions" if benchmark.headline == "all" else "choices",
        "headline": accuracy(headline),
    }
    if len(headline) != len(results):
        found["all"] = accuracy(results)
    if spans:
        found["recall"] = {f"{m:g}": _recall(spans, m) for m in RECALLS}
    groups = {name: by_group(results, name) for name in benchmark.by}
    if benchmark.macro and groups.get(benchmark.macro):
        parts = groups[benchmark.macro]
        interval = macro_interval([strict_scores(part) for part in parts.values()]).to_json()
        found["macro"] = {"over": benchmark.macro, "groups": len(parts), "strict": interval["mean"]} | {
            key: interval[key] for key in ("low", "high", "n")
        }
    found["by"] = {
        name: {group: accuracy(part) | {"counts": counts(part)} for group, part in parts.items()}
        for name, parts in groups.items()
        if parts
    }
    found["tools"] = tool_use(results)
    found["counts"] = counts(results)
    found["error_share"] = round(error_share(results), 10)
    found["reasons"] = dict(list(reasons(results).items())[:NAMED_REASONS])
    if questions is not None:
        found["table"] = {"rows": questions.rows, "published_rows": benchmark.published_rows} | {
            "set_aside": dict(sorted(questions.set_aside.items()))
        }
    return found


def by_group(results: Sequence[Result], name: str) -> dict[str, list[Result]]:
    """The results of each group of `name`, in order of the group's name; numbers in it count as numbers."""
    parts: dict[str, list[Result]] = {}
    for result in results:
        value = (result.groups or {}).get(name)
        for group in value if isinstance(value, list) else [] if value is None else [value]:
            parts.setdefault(str(group), []).append(result)
    return {group: parts[group] for group in sorted(parts, key=_natural)}


def _natural(group: str) -> tuple:
    known = ("short", "medium", "long")
    if group in known:
        return (0, known.index(group), group)
    head = group.split()[0] if group.split() else ""
    return (1, float(head), group) if head.isdecimal() else (2, 0, group)


def _recall(results: Sequence[Result], least: float) -> float | None:
    """Strict: a question without a readable span has IoU 0."""
    scores = strict_scores(results)
    return round(sum(score >= least for score in scores) / len(scores), 10) if scores else None


def tool_use(results: Sequence[Result]) -> dict[str, Any]:
    """How the tool was used in the episodes that ran, and how right they were with it and without."""
    ran = [result for result in results if result.status in ("answered", "unparsed")]
    if not ran:
        return {"episodes": 0}
    statuses: Counter[str] = Counter()
    for result in ran:
        statuses.update(result.tools or {})
    turns, clamped, forced = (statuses.pop(name, 0) for name in ("turns", "clamped", "forced"))
    used = [result for result in ran if result.calls]
    unused = [result for result in ran if not result.calls]
    return {
        "episodes": len(ran),
        "share_with_calls": round(len(used) / len(ran), 10),
        "calls_per_question": round(sum(result.calls or 0 for result in ran) / len(ran), 10),
        "calls_by_outcome": dict(sorted(statuses.items())),
        "windows_cut_to_the_video": clamped,
        "answers_asked_for": forced,
        "turns_per_question": round(turns / len(ran), 10),
        "accuracy_with_calls": _mean(used),
        "accuracy_without_calls": _mean(unused),
    }


def _mean(results: Sequence[Result]) -> float | None:
    scores = strict_scores(results)
    return round(sum(scores) / len(scores), 10) if scores else None


TABLE_HEAD = ("benchmark", "score", "95 %", "answered", "n", "unparsed", "failed", "skipped", "calls")


def table_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """One benchmark under TABLE_HEAD: percent with the interval, and what became of its questions."""
    headline, states = figures["headline"], figures["counts"]
    return (
        figures["benchmark"],
        percent(headline["strict"]),
        f"{percent(headline['low'])}-{percent(headline['high'])}",
        percent(headline["answered"]),
        str(headline["n"]),
        *(str(states[state]) for state in ("unparsed", "failed", "skipped")),
        f"{figures['tools'].get('calls_per_question', 0):.2f}",
    )


def detail_lines(figures: Mapping[str, Any]) -> list[str]:
    """What stands below the table for one benchmark: measure, macro, recall, groups, reasons."""
    lines = [f"{figures['benchmark']}: {figures['measure']} over {figures['over']}"]
    if "all" in figures:
        part = figures["all"]
        lines.append(f"  over all questions {percent(part['strict'])} (n {part['n']})")
    if "macro" in figures:
        macro = figures["macro"]
        lines.append(
            f"  macro over {macro['groups']} groups of {macro['over']} {percent(macro['strict'])} "
            f"({percent(macro['low'])}-{percent(macro['high'])})"
        )
    if "recall" in figures:
        lines.append("  " + ", ".join(f"R@{m} {percent(value)}" for m, value in figures["recall"].items()))
    for name, groups in figures["by"].items():
        parts = [f"{group} {percent(part['strict'])} (n {part['n']})" for group, part in groups.items()]
        lines.append(f"  by {name}: " + ", ".join(parts))
    for reason, times in list(figures["reasons"].items())[:3]:
        lines.append(f"  {times} x {reason}")
    table = figures.get("table") or {}
    if table.get("set_aside"):
        lines.append(
            f"  {len(table['set_aside'])} rows of the table are no question; summary.json names them"
        )
    if table.get("published_rows") and table["rows"] != table["published_rows"]:
        lines.append(f"  the table has {table['rows']} rows, the published one {table['published_rows']}")
    return lines
