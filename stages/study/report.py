"""Write the study's report from the results in git: `python -m stages.study.report`.

Reads study/arms.yaml and study/results/*.json, as many as there are. Writes study/report/{report.md,
report.json, plots/*.png}. Needs no model, no data and no run: equal results give equal bytes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any

from paravt.checkpoints import publish
from stages import figures, plots
from stages.command import command
from stages.document import Block, Figure, Heading, Paragraph, Table, to_markdown, write_markdown
from stages.outputs import write_json
from stages.study.arms import HOME, RESULTS, STARTS, Study, read_study
from stages.study.findings import (
    CALLS_IN_TRAINING,
    COMPLIANCE_IN_TRAINING,
    FORMAT_IN_TRAINING,
    Column,
    Finding,
    Runs,
    difference_of,
    findings,
    interval_of,
)
from stages.study.record import read_records
from stages.tables import difference, interval, listed, number

TARGET = HOME / "report"
TITLE = "What each part of PARA-GRPO buys, at tiny scale"
MAIN = ("vanilla_grpo", "anchoring_only", "gating_only", "para_grpo")
VANILLA = "vanilla_grpo"

# arXiv 2605.20342, Table 2: f_tau, kappa, VideoMME without and with subtitles, LVBench, MLVU
PUBLISHED = {
    "base": (0.03, 0.45, 59.9, 68.4, 33.1, 58.3),
    "sft": (0.13, 2.50, 60.7, 69.0, 39.1, 63.7),
    "vanilla_grpo": (0.13, 0.02, 62.0, 68.6, 39.3, 64.5),
    "para_grpo": (0.41, 0.21, 62.1, 69.4, 39.8, 65.0),
    "anchoring_only": (0.35, 0.19, 61.7, 68.7, 39.3, 64.1),
    "gating_only": (0.10, 1.36, 61.3, 68.7, 39.1, 63.6),
    "no_tool_reward": (0.33, 0.04, 61.9, 68.5, 38.7, 64.3),
}
LIMITS = (
    "What this study cannot say. All arms start from one SFT checkpoint, so the variance of SFT is left "
    "out. The base is a model of 1.3 million weights whose loose format and tool habit were put there by "
    "this project; it stands in for a tool-native model and is no evidence about one. Questions come from "
    "a rendered world, not from the public benchmarks. A finding that holds here says that the mechanism "
    "works in this code, not that it has the published size at 8B."
)
COLUMNS = (
    "Format compliance is the share of sampled episodes, in percent, in which every turn is well formed "
    "and the last one answers. Accuracy is greedy, in percent of all questions, by overview frames K. "
    "f_tau and kappa are means over the training steps: the format reward in [0, 1], and tool calls that "
    "ran per episode. Brackets hold 95 % intervals from a bootstrap over training seeds and questions "
    "(over seeds alone for f_tau and kappa). base and SFT were not trained here and were asked once."
)
OTHER_BASES = (
    "The same architecture and abilities with other habits (`study/arms.yaml`, `stages/study/base.py`): "
    "without loose formats, with twice as many, and without the habit of calling the tool. Each was cold "
    "started by the same SFT."
)
FINDINGS = (
    "Ours is the paired difference that the statement is about, with its 95 % interval over questions and "
    "seeds: compliance at temperature 1 and accuracy in percentage points, f_tau and kappa as they are. "
    "It holds if the interval excludes 0 on the published side and each seed has that sign."
)
BESIDE = (
    "Published: Qwen3-VL-8B, one run each, percent on public benchmarks (arXiv 2605.20342, Table 2). "
    "Ours: the needle split. f_tau is not the same quantity: the published one is the mean of its own "
    "format reward at temperature 0.7, ours the mean of the reward that the arm was trained with. Rows "
    "and columns stand beside each other for their order, not for their values."
)


def build(study: Study, runs: Runs) -> tuple[list[Block], dict[str, Any]]:
    """The report's blocks, and the figures of report.json."""
    results = [result for records in runs.values() for record in records for result in record.results]
    budgets = sorted({result.budget for result in results if not result.temperature})
    temperatures = sorted({result.temperature for result in results} - {0.0})
    accuracy = [figures.accuracy(budget, "all") for budget in budgets]
    compliance = [figures.compliance(temperature) for temperature in temperatures]
    calls = [figures.tool_calls(0.0, budget) for budget in budgets[:1]]
    calls += [figures.tool_calls(temperature) for temperature in temperatures[-1:]]
    trained: list[Column] = [COMPLIANCE_IN_TRAINING, FORMAT_IN_TRAINING, CALLS_IN_TRAINING]
    columns: list[Column] = [*compliance, *accuracy, *calls, *trained]
    main = [name for name in (*STARTS, *MAIN) if name in runs]
    arms = [name for name in MAIN if name in runs and name != VANILLA]
    pairs = [base for base in study.bases if {base, f"{base}_para", f"{base}_vanilla"} <= set(runs)]
    based = [name for name in runs if study.arm(name).start.name in study.bases]
    others = [name for name in runs if name not in (*main, *based)]
    found = findings(runs, lambda budget: figures.accuracy(budget, "all"), compliance[-1], calls[-1], budgets)
    blocks: list[Block] = [
        Heading(TITLE, 1),
        Paragraph(_lead(study, runs)),
        Heading("Which published findings hold"),
        _findings_table(found),
        Paragraph(LIMITS),
        Heading("The four arms"),
        _columns_table(study, runs, main, columns, COLUMNS),
        _changes(study, runs, arms, columns, VANILLA, "Each arm minus vanilla GRPO"),
        Heading("Beside the published table"),
        _beside(study, runs, accuracy),
        Heading("In training"),
        _curves(study, runs),
    ]
    if others:
        shown = [name for name in ("para_grpo", *others) if name in runs]
        blocks += [
            Heading("One thing changed"),
            _columns_table(study, runs, shown, columns, COLUMNS),
            _changes(study, runs, others, columns, "para_grpo", "Each variant minus PARA-GRPO"),
        ]
    if pairs:
        blocks += [
            Heading("Other bases"),
            Paragraph(OTHER_BASES),
            _columns_table(study, runs, based, columns, COLUMNS),
            _contrast(study, runs, pairs, columns),
        ]
    return blocks, _numbers(runs, columns, found)


def _lead(study: Study, runs: Runs) -> str:
    parts = [
        f"{study.arm(name).label} ({listed([record.seed for record in records])})"
        for name, records in runs.items()
        if study.arm(name).trained
    ]
    return (
        f"Scale `{study.scale}`. Each arm was trained from the same SFT checkpoint on the same questions and "
        f"differs by its overrides of `conf/` alone (`study/arms.yaml`). Training seeds: {'; '.join(parts)}. "
        "Written by `make study` from `study/results/`."
    )


def _findings_table(found: Sequence[Finding]) -> Table:
    rows = [
        [item.says, item.published, difference(item.ours, item.percent), item.verdict]
        for item in found
        if item.ours is not None
    ]
    return Table(["finding", "published", "ours", "here"], rows, FINDINGS)


def _columns_table(
    study: Study, runs: Runs, names: Sequence[str], columns: Sequence[Column], caption: str
) -> Table:
    rows = [
        [
            study.arm(name).label,
            *(interval(interval_of(column, runs[name]), column.percent) for column in columns),
        ]
        for name in names
    ]
    return Table(["", *(column.label for column in columns)], rows, caption)


def _contrast(study: Study, runs: Runs, bases: Sequence[str], columns: Sequence[Column]) -> Table:
    """PARA-GRPO minus vanilla GRPO: from the tiny base's start, then from the others."""
    pairs = {study.arm("sft").label: ("vanilla_grpo", "para_grpo")}
    pairs |= {study.arm(base).label: (f"{base}_vanilla", f"{base}_para") for base in bases}
    rows = []
    for label, (first, second) in pairs.items():
        found = [difference_of(column, runs.get(first, ()), runs.get(second, ())) for column in columns]
        cells = [difference(item, column.percent) for item, column in zip(found, columns, strict=True)]
        rows.append([label, *cells])
    caption = "PARA-GRPO minus vanilla GRPO by start, paired by seed and question, with 95 % intervals."
    return Table(["", *(column.label for column in columns)], rows, caption)


def _changes(
    study: Study, runs: Runs, names: Sequence[str], columns: Sequence[Column], of: str, caption: str
) -> Table:
    """Each of `names` minus the arm `of`."""
    rows = [
        [
            study.arm(name).label,
            *(
                difference(difference_of(column, runs.get(of, ()), runs[name]), column.percent)
                for column in columns
            ),
        ]
        for name in names
    ]
    caption += ", paired by seed and question, with 95 % intervals."
    return Table(["", *(column.label for column in columns)], rows, caption)


def _beside(study: Study, runs: Runs, accuracy: Sequence[Column]) -> Table:
    ours: list[Column] = [FORMAT_IN_TRAINING, CALLS_IN_TRAINING, *accuracy]
    header = ["", "f_tau", "kappa", "VideoMME", "with subtitles", "LVBench", "MLVU"]
    header += [f"ours: {column.label}" for column in ours]
    rows = []
    for name, published in PUBLISHED.items():
        if name not in study.arms:
            continue
        cells = ["–"] * len(ours)
        if name in runs:
            cells = [number(interval_of(column, runs[name]).mean, column.percent) for column in ours]
        rows.append([study.arms[name].label, *_published(published), *cells])
    return Table(header, rows, BESIDE)


def _published(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in values[:2]] + [f"{value:.1f}" for value in values[2:]]


def _curves(study: Study, runs: Runs) -> Figure:
    """Mean over seeds of each arm, step by step, smoothed over five steps."""
    titles = {
        "compliance": "format compliance",
        "reward/format": "format reward",
        "calls/run": "tool calls per episode",
        "reward/accuracy": "accuracy reward",
        "entropy_structural": "entropy of structural tokens",
        "groups_without_spread": "groups without spread",
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for curve, title in titles.items():
        for name in MAIN:
            points = _smoothed([record.curves.get(curve, ()) for record in runs.get(name, ())])
            if points:
                panels[title][study.arm(name).label] = points
    caption = "Mean over training seeds, running mean over five steps; each arm samples at temperature 1."
    return Figure("training", plots.panels(panels, "step"), caption)


def _smoothed(seeds: Sequence[Sequence[float | None]], width: int = 5) -> list[tuple[float, float]]:
    """(step, mean over seeds and the last `width` steps), steps from 1; a step without any value has none."""
    points = []
    for step in range(max((len(values) for values in seeds), default=0)):
        window = [
            value
            for values in seeds
            for value in values[max(0, step - width + 1) : step + 1]
            if value is not None
        ]
        if window:
            points.append((step + 1.0, sum(window) / len(window)))
    return points


def _numbers(runs: Runs, columns: Sequence[Column], found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "arms": {
            name: {
                "seeds": [record.seed for record in records],
                **{column.key: interval_of(column, records).to_json() for column in columns},
            }
            for name, records in runs.items()
        },
        "findings": [
            {
                "says": item.says,
                "published": item.published,
                "ours": item.ours.to_json() if item.ours else None,
                "verdict": item.verdict,
            }
            for item in found
        ],
    }


def gather(study: Study, folder: Path) -> dict[str, list]:
    """Records by arm, in the study's order; runs that are in no group of the study are named and left out."""
    runs: dict[str, list] = {name: [] for name in study.arms}
    for record in read_records(folder):
        if record.seed in study.seeds.get(record.arm, ()):
            runs[record.arm].append(record)
        else:
            print(
                f"study: {record.arm}, seed {record.seed}, is in no group of the study; left out",
                file=sys.stderr,
            )
    return {name: sorted(records, key=lambda r: r.seed) for name, records in runs.items() if records}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.study.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("study report"):
        study = read_study(Path.cwd())
        runs = gather(study, RESULTS)
        if not any(study.arm(name).trained for name in runs):
            raise ValueError(f"{RESULTS} holds no trained arm; run `make study`")
        blocks, numbers = build(study, runs)

        def write(folder: Path) -> None:
            write_markdown(folder, blocks)
            write_json(folder / "report.json", numbers)

        publish(TARGET, write)
        print(to_markdown(blocks[:4]))
        print(f"study: {TARGET / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
