"""What the published study says, and whether this one says the same.

A finding is a difference between two recipes in one measure, with the sign that the publication reports. It
holds if our 95 % interval over questions and seeds excludes 0 on that side and all seeds agree in sign.
Published figures: arXiv 2605.20342, Table 2 (one run each, no intervals).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paravt.benchmarks.statistics import Difference, Interval, bootstrap_interval, paired_difference
from stages.figures import Measure, Values, difference
from stages.study.record import Record

Runs = Mapping[str, Sequence[Record]]  # by arm, in order of seeds


@dataclass(frozen=True)
class Training:
    """A mean over a run's training steps: the publication's f_tau and kappa are of this kind."""

    key: str
    label: str
    curve: str
    percent: bool = False

    def of(self, record: Record) -> float | None:
        values = [value for value in record.curves.get(self.curve, ()) if value is not None]
        return sum(values) / len(values) if values else None


FORMAT_IN_TRAINING = Training("f_tau_training", "f_tau, training", "reward/format")
COMPLIANCE_IN_TRAINING = Training("compliance_training", "compliance, training", "compliance", percent=True)
CALLS_IN_TRAINING = Training("kappa_training", "kappa, training", "calls/run")

Column = Measure | Training


def interval_of(column: Column, records: Sequence[Record]) -> Interval:
    """Mean and limits over seeds, and over questions where the column has a value per question."""
    if isinstance(column, Training):
        found = [column.of(record) for record in records]
        known = [[value] for value in found if value is not None]
        return bootstrap_interval(known) if known else Interval(None, None, None, 0)
    values = [column.of(record.results) for record in records]
    shared = [name for name in values[0] if all(name in other for other in values)] if values else []
    return (
        bootstrap_interval([[found[name] for name in shared] for found in values])
        if shared
        else (Interval(None, None, None, 0))
    )


def difference_of(column: Column, first: Sequence[Record], second: Sequence[Record]) -> Difference | None:
    """Second minus first, paired by seed and question. A start has one run, which stands beside each seed."""
    pairs = paired(first, second)
    if not pairs:
        return None
    if isinstance(column, Training):
        found = [(column.of(a), column.of(b)) for a, b in pairs]
        if any(value is None for pair in found for value in pair):
            return None
        return paired_difference([[a] for a, _ in found], [[b] for _, b in found])
    before: list[Values] = [column.of(a.results) for a, _ in pairs]
    after: list[Values] = [column.of(b.results) for _, b in pairs]
    return difference(before, after)


def paired(first: Sequence[Record], second: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Runs of the same seed. A start that was only asked is the same for every seed."""
    starts = [records[0] if records and not records[0].curves else None for records in (first, second)]
    by_seed = [{record.seed: record for record in records} for records in (first, second)]
    seeds = [set(found) for found, start in zip(by_seed, starts, strict=True) if start is None]
    shared = sorted(set.intersection(*seeds)) if seeds else [1]
    return [
        (starts[0] or by_seed[0][seed], starts[1] or by_seed[1][seed])
        for seed in shared
        if all(start or seed in found for start, found in zip(starts, by_seed, strict=True))
    ]


@dataclass(frozen=True)
class Finding:
    """A published statement, and our figures for it."""

    says: str
    published: str
    sign: Literal[1, 0, -1]
    ours: Difference | None
    percent: bool

    @property
    def verdict(self) -> str:
        """`not run`; for no change `no difference seen` or `a difference is seen`; else `holds`, `not shown`
        or `the opposite is seen`.
        """
        if self.ours is None:
            return "not run"
        if not self.sign:
            return "a difference is seen" if self.ours.clear else "no difference seen"
        if not self.ours.clear:
            return "not shown"
        return "holds" if self.ours.mean * self.sign > 0 else "the opposite is seen"


def findings(
    runs: Runs,
    accuracy: Callable[[int], Measure],
    compliance: Measure,
    calls: Measure,
    budgets: Sequence[int],
) -> list[Finding]:
    """The statements of the publication's ablation that a run of this study can speak to."""
    found = []

    def add(
        says: str, published: str, sign: Literal[1, 0, -1], column: Column, first: str, second: str
    ) -> None:
        ours = difference_of(column, runs.get(first, ()), runs.get(second, ()))
        found.append(Finding(says, published, sign, ours, column.percent))

    add("SFT raises format over the base", "f_tau 0.03 -> 0.13", 1, compliance, "base", "sft")
    add("SFT raises tool use over the base", "kappa 0.45 -> 2.50", 1, calls, "base", "sft")
    add(
        "vanilla GRPO leaves format where SFT had it",
        "f_tau 0.13 -> 0.13",
        0,
        compliance,
        "sft",
        "vanilla_grpo",
    )
    add("vanilla GRPO makes the tool die out", "kappa 2.50 -> 0.02", -1, calls, "sft", "vanilla_grpo")
    for name, says, published in (
        ("para_grpo", "PARA-GRPO has better format than vanilla GRPO", "f_tau 0.13 -> 0.41"),
        ("anchoring_only", "anchoring alone has better format than vanilla GRPO", "f_tau 0.13 -> 0.35"),
    ):
        add(says, published, 1, compliance, "vanilla_grpo", name)
        add(f"{says}, in training", published, 1, FORMAT_IN_TRAINING, "vanilla_grpo", name)
    says, published = "gating alone does not help format", "f_tau 0.13 -> 0.10"
    add(says, published, 0, compliance, "vanilla_grpo", "gating_only")
    add(f"{says}, in training", published, 0, FORMAT_IN_TRAINING, "vanilla_grpo", "gating_only")
    for name, says, published in (
        ("para_grpo", "PARA-GRPO calls the tool more than vanilla GRPO", "kappa 0.02 -> 0.21"),
        ("anchoring_only", "anchoring alone calls the tool more than vanilla GRPO", "kappa 0.02 -> 0.19"),
        ("gating_only", "gating alone calls the tool more than vanilla GRPO", "kappa 0.02 -> 1.36"),
    ):
        add(says, published, 1, CALLS_IN_TRAINING, "vanilla_grpo", name)
    add(
        "without the tool reward the tool is called less",
        "kappa 0.21 -> 0.04",
        -1,
        CALLS_IN_TRAINING,
        "para_grpo",
        "no_tool_reward",
    )
    for budget in budgets:
        says = f"PARA-GRPO answers better than vanilla GRPO, K = {budget}"
        add(says, "+0.1 to +0.8 points", 1, accuracy(budget), "vanilla_grpo", "para_grpo")
    for budget in budgets:
        says = f"PARA-GRPO answers better than SFT, K = {budget}"
        add(says, "+0.4 to +1.4 points", 1, accuracy(budget), "sft", "para_grpo")
    return found
