"""The report's tables, plots and numbers: figures in, blocks of a page out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import Difference, Interval
from paravt.benchmarks.summary import accuracy, counts
from stages import plots
from stages.document import Block, Figure, Table
from stages.figures import PAIRS, Claim, Comparison

LABELS = {"base": "base", "sft": "SFT", "para_grpo": "PARA-GRPO"}
STATES = ("asked", "answered", "unparsed", "failed", "skipped")
VERDICTS = {
    "shown": "shown",
    "not shown": "not shown, the interval includes 0",
    "the opposite is seen": "no, the opposite is seen",
}

# Panels of the training curves: a title, and the metrics in it by label. A panel without data is left out.
PANELS: dict[str, dict[str, dict[str, str]]] = {
    "sft": {
        "loss": {"loss": "loss"},
        "token accuracy": {"accuracy": "token_accuracy"},
        "gradient norm": {"norm": "grad_norm"},
    },
    "para_grpo": {
        "reward": {"total": "reward/total"},
        "parts of the reward": {
            "accuracy": "reward/accuracy",
            "format": "reward/format",
            "tool": "reward/tool",
        },
        "format compliance": {"compliance": "compliance"},
        "structural sites that are right": {
            "think": "site/think",
            "call": "site/call",
            "answer": "site/answer",
        },
        "episodes with an unclosed tag": {
            "think": "unclosed/think",
            "call": "unclosed/call",
            "answer": "unclosed/answer",
        },
        "tool calls per episode": {"run": "calls/run", "malformed": "calls/malformed"},
        "calls that did not run, per episode": {
            "unreadable": "calls/malformed",
            "bad window": "calls/error",
            "past the cap": "calls/over_cap",
        },
        "how episodes end": {
            "answered": "stop/answered",
            "no answer": "stop/no_answer",
            "truncated": "stop/truncated",
        },
        "groups": {"without spread": "groups_without_spread"},
        "entropy per token": {
            "all": "entropy",
            "structural": "entropy_structural",
            "other": "entropy_other",
        },
        "KL to the start, per token": {"KL": "ref_kl"},
        "importance ratio, engine to trainer": {"before": "ratio_before", "after": "ratio_after"},
    },
}


def comparison_table(rows: Sequence[Comparison], caption: str) -> Table:
    """A line per measure: each model with its interval, then the paired differences."""
    pairs = [pair for pair in PAIRS if all(pair in row.differences for row in rows)]
    header = ["", *LABELS.values(), *(f"{LABELS[b]} − {LABELS[a]}" for a, b in pairs)]
    lines = []
    for row in rows:
        percent = row.measure.percent
        cells = [interval(row.intervals[name], percent) for name in LABELS]
        cells += [difference(row.differences[pair], percent) for pair in pairs]
        lines.append([row.measure.label, *cells])
    return Table(header, lines, caption)


def count_table(
    models: Mapping[str, Sequence[Result]],
    budgets: Sequence[int],
    temperatures: Sequence[float],
    caption: str,
) -> Table:
    """What became of the questions of each model, and both accuracies."""
    header = ["", *STATES, "accuracy, all", "accuracy, answered"]
    lines = []
    for name, results in models.items():
        greedy = [result for result in results if not result.temperature]
        parts = {f"greedy, K = {k}": [r for r in greedy if r.budget == k] for k in budgets}
        parts |= {f"temperature {t:g}": [r for r in results if r.temperature == t] for t in temperatures}
        for label, part in parts.items():
            states, score = counts(part), accuracy(part)
            both = [number(score[key], percent=True) for key in ("strict", "answered")]
            lines.append([f"{LABELS[name]}, {label}", *(str(states[state]) for state in STATES), *both])
    return Table(header, lines, caption)


def accuracy_figure(rows: Sequence[Comparison], budgets: Sequence[int]) -> Figure:
    """Accuracy over all questions by frame budget."""
    overall = {f"accuracy_k{budget}_all": budget for budget in budgets}
    series: dict[str, list[plots.Point]] = {label: [] for label in LABELS.values()}
    for row in rows:
        for name, label in LABELS.items() if row.measure.key in overall else ():
            found = row.intervals[name]
            if found.mean is not None:
                budget = overall[row.measure.key]
                series[label].append(plots.Point(budget, found.mean, found.low, found.high))
    drawn = {label: points for label, points in series.items() if points}
    caption = "Greedy accuracy over all questions by frame budget, with 95 % intervals."
    return Figure("accuracy", plots.intervals(drawn, "overview frames K", "accuracy"), caption)


def curve_figures(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Block]:
    """The training curves of each stage."""
    found: list[Block] = []
    for name, steps in curves.items():
        panels = {}
        for title, lines in PANELS[name].items():
            drawn = {
                label: [(step["step"], step[metric]) for step in steps if metric in step]
                for label, metric in lines.items()
            }
            drawn = {label: points for label, points in drawn.items() if points}
            if drawn:
                panels[title] = drawn
        if panels:
            caption = f"{LABELS[name]}, {len(steps)} steps."
            found.append(Figure(f"training_{name}", plots.panels(panels, "step"), caption))
    return found


def claim_sentence(claim: Claim) -> str:
    """What the claim says, the verdict, and the figures behind it."""
    if claim.difference is None:
        return f"{claim.says}: not measured."
    return f"{claim.says}: {VERDICTS[claim.verdict]} ({difference(claim.difference, claim.percent)})."


def interval(found: Interval, percent: bool) -> str:
    """`62.1 [56.3, 68.0]`, or a dash where there is nothing to average."""
    if found.mean is None:
        return "–"
    return f"{number(found.mean, percent)} [{number(found.low, percent)}, {number(found.high, percent)}]"


def difference(found: Difference | None, percent: bool) -> str:
    """`+3.1 [+0.4, +6.0]`, or a dash where nothing is shared."""
    if found is None:
        return "–"
    mean, low, high = (number(value, percent, signed=True) for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def number(value: float | None, percent: bool, signed: bool = False) -> str:
    """Percent with one digit after the point, other values with two; no sign stands before a zero."""
    if value is None:
        return "–"
    digits = 1 if percent else 2
    shown = round(100 * value if percent else value, digits) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{shown:+.{digits}f}" if signed and shown else f"{shown:.{digits}f}"


def listed(words: Sequence[object]) -> str:
    """`4, 8 and 16`."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
