"""The figures of the report: measures of a model, their intervals, their differences, and what they show.

A measure is a value per question. Two models are compared on the questions that have a value in both,
question by question, so that what makes a question hard cancels. A run is the results of each model under one
seed; with several runs, questions and seeds are redrawn, and only questions that all seeds have are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paravt.benchmarks.results import FINISHED, Result
from paravt.benchmarks.statistics import Difference, Interval, bootstrap_interval, paired_difference

PAIRS = (("base", "sft"), ("sft", "para_grpo"))
TYPE_NAMES = {"all": "all", "mcq": "choice", "tvg": "grounding (IoU)", "oe": "open (F1)"}


Values = Mapping[str, float]  # by question id
Run = Mapping[str, Sequence[Result]]  # by model


@dataclass(frozen=True)
class Measure:
    """`value` of a result, None where it has none; `percent` says how it is written."""

    key: str
    label: str
    value: Callable[[Result], float | None]
    percent: bool = True

    def of(self, results: Sequence[Result]) -> dict[str, float]:
        """Values by question id."""
        found = [(result.id, self.value(result)) for result in results]
        return {name: value for name, value in found if value is not None}


@dataclass(frozen=True)
class Comparison:
    """One measure over all models: an interval each, and the difference of each pair."""

    measure: Measure
    intervals: dict[str, Interval]
    differences: dict[tuple[str, str], Difference | None] = field(default_factory=dict)


def compare(measure: Measure, runs: Sequence[Run]) -> Comparison:
    """Intervals of each model, and second minus first of each pair whose models are there."""
    names = list(runs[0])
    values = {name: [measure.of(run[name]) for run in runs] for name in names}
    intervals = {}
    for name, seeds in values.items():
        shared = _shared(seeds)
        intervals[name] = bootstrap_interval([[found[question] for question in shared] for found in seeds])
    pairs = [pair for pair in PAIRS if set(pair) <= set(names)]
    differences = {(first, second): difference(values[first], values[second]) for first, second in pairs}
    return Comparison(measure, intervals, differences)


def difference(first: Sequence[Values], second: Sequence[Values], factor: float = 1.0) -> Difference | None:
    """Second minus `factor` x first, one entry a seed, over the questions that all have; None without any."""
    shared = _shared([*first, *second])
    if not shared:
        return None
    return paired_difference(
        [[factor * found[question] for question in shared] for found in first],
        [[found[question] for question in shared] for found in second],
    )


def _shared(seeds: Sequence[Values]) -> list[str]:
    """The questions that every seed has a value for, in the order of the first."""
    return [question for question in seeds[0] if all(question in found for found in seeds)]


def accuracy(budget: int, kind: str) -> Measure:
    """Strict greedy accuracy at a frame budget: what failed or cannot be read counts as 0."""

    def value(result: Result) -> float | None:
        if result.temperature or result.budget != budget or kind not in ("all", result.question_type):
            return None
        return result.score if result.status == "answered" else 0.0

    return Measure(f"accuracy_k{budget}_{kind}", f"K = {budget}, {TYPE_NAMES[kind]}", value)


def compliance(temperature: float) -> Measure:
    return Measure(
        f"compliance_t{temperature:g}",
        f"format compliance, temperature {temperature:g}",
        _ran(temperature, lambda result: None if result.compliant is None else float(result.compliant)),
    )


def format_reward(temperature: float) -> Measure:
    return Measure(
        f"f_tau_t{temperature:g}",
        f"mean format reward f_tau, temperature {temperature:g}",
        _ran(temperature, lambda result: result.format),
        percent=False,
    )


def tool_calls(temperature: float, budget: int | None = None) -> Measure:
    where = f"temperature {temperature:g}" if budget is None else f"greedy, K = {budget}"
    key = f"calls_t{temperature:g}" if budget is None else f"calls_k{budget}"
    return Measure(
        key,
        f"tool calls per episode, {where}",
        _ran(temperature, lambda result: float(result.calls or 0), budget),
        percent=False,
    )


def _ran(
    temperature: float, value: Callable[[Result], float | None], budget: int | None = None
) -> Callable[[Result], float | None]:
    """The value of episodes that ran at this temperature (and budget); a failed one has none."""

    def of(result: Result) -> float | None:
        wanted = result.temperature == temperature and budget in (None, result.budget)
        return value(result) if wanted and result.status in FINISHED else None

    return of


@dataclass(frozen=True)
class Claim:
    """Something that training is meant to bring, and what the figures say about it."""

    key: str
    says: str
    difference: Difference | None
    percent: bool = True

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "not measured"
        if self.difference.clear and self.difference.mean > 0:
            return "shown"
        return "the opposite is seen" if self.difference.clear else "not shown"


def claims(runs: Sequence[Run]) -> list[Claim]:
    """SFT above base in compliance; PARA-GRPO above SFT in compliance at the highest temperature and in
    accuracy at the smaller budgets, with at least half of SFT's tool calls."""
    results = [result for run in runs for found in run.values() for result in found]
    budgets = sorted({result.budget for result in results if not result.temperature})
    temperatures = sorted({result.temperature for result in results} - {0.0})
    found = []

    def add(key: str, says: str, measure: Measure, pair: tuple[str, str], factor: float = 1.0) -> None:
        first, second = ([measure.of(run[name]) for run in runs] for name in pair)
        found.append(Claim(key, says, difference(first, second, factor), measure.percent))

    for temperature in temperatures:
        says = f"SFT is above base in format compliance at temperature {temperature:g}"
        add(f"sft_compliance_t{temperature:g}", says, compliance(temperature), ("base", "sft"))
    if temperatures:
        top = temperatures[-1]
        says = f"PARA-GRPO is above SFT in format compliance at temperature {top:g}"
        add(f"para_compliance_t{top:g}", says, compliance(top), ("sft", "para_grpo"))
    for budget in budgets[:-1] or budgets:
        says = f"PARA-GRPO is above SFT in accuracy at K = {budget}"
        add(f"para_accuracy_k{budget}", says, accuracy(budget, "all"), ("sft", "para_grpo"))
    if temperatures:
        says = f"PARA-GRPO makes more than half of SFT's tool calls at temperature {temperatures[-1]:g}"
        add("para_calls_kept", says, tool_calls(temperatures[-1]), ("sft", "para_grpo"), factor=0.5)
    return found
