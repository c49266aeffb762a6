"""Write the report: one page, as Markdown and as HTML that opens offline, with its plots and figures.

Reads reports/evaluate/{base,sft,para_grpo}/results.jsonl, reports/{sft,para_grpo}/metrics.jsonl and
params.yaml; where published splits were asked, their summaries too, beside the published table. Writes
reports/report/{report.md,report.html,metrics.json,plots/*.png}. Equal inputs give equal bytes: no file holds
a time, a run id or a path of this machine. Times are in the tracked runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
import json
from pathlib import Path
import sys
from typing import Any

from paravt.benchmarks import published
from paravt.benchmarks.results import Result, read_results
from paravt.checkpoints import publish
from paravt.config import Params
from stages import figures
from stages import params as parameters
from stages.command import command
from stages.document import Block, Bullets, Heading, Paragraph, Table, to_html, write_markdown
from stages.figures import Claim, Comparison, compare
from stages.outputs import write_json
from stages.tables import (
    accuracy_figure,
    claim_sentence,
    comparison_table,
    count_table,
    curve_figures,
    listed,
)
from stages.tracking import StageReporter, stage_run

NAMES = ("base", "sft", "para_grpo")
KINDS = ("all", "mcq", "tvg", "oe")
REPORTS = Path("reports")
TITLE = "What training changed"

CAVEAT = (
    "Brackets hold 95 % intervals from a bootstrap over questions; a difference pairs the two models "
    "question by question. This is one seed: the intervals speak for other questions, not for another "
    "training run. For tool calls the figure is PARA-GRPO's minus half of SFT's."
)
ACCURACY = (
    "Greedy answers, in percent of all questions: an answer that cannot be read, or a question that "
    "failed, counts as 0. Choices are right or wrong, grounding is temporal IoU, open answers are token "
    "F1."
)
BEHAVIOUR = (
    "Format compliance is the share of episodes, in percent, in which every turn is well formed and the "
    "last one answers. f_tau is the mean format reward, from 0 to 1. Tool calls are calls that really "
    "ran. Where a temperature is given, frame budgets are mixed alike for all models."
)
COUNTS = (
    "Unparsed: the episode ended, but no answer can be read from it. Failed and skipped questions have a "
    "reason in `results.jsonl`. Accuracy is over all questions, and over the answered ones."
)
STAND_IN = (
    "The base is a small model that this project pretrained; `models/tiny-base/README.md` says how. Its "
    "loose format (two call styles, missing tags, answers without tags) was put there on purpose, so that"
    " SFT has a format to teach and sampling has one to break. It stands in for a tool-native model, and "
    "is no evidence about one."
)


class ReportError(ValueError):
    """Something that the report needs is missing; the message says what to run."""


@dataclass(frozen=True)
class Inputs:
    """Results of each model, one line a step of each training, figures of the published splits by model."""

    params: Params
    models: dict[str, list[Result]]
    curves: dict[str, list[dict[str, float]]]
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_inputs(reports: Path, params: Params) -> Inputs:
    """Everything under `reports`. Raises ReportError naming the first file that is missing or unreadable."""
    models = {
        name: _read(reports / "evaluate" / name / "results.jsonl", read_results, f"evaluate@{name}")
        for name in NAMES
    }
    trained = [name for name in NAMES[1:] if name != "sft" or params.sft.source == "traces"]
    curves = {name: _read(reports / name / "metrics.jsonl", _read_steps, name) for name in trained}
    paths = {name: reports / "evaluate" / name / "benchmarks" / "summary.json" for name in NAMES}
    splits = {
        name: _read(path, lambda path: json.loads(path.read_text(encoding="utf-8")), f"evaluate@{name}")
        for name, path in paths.items()
        if path.is_file()  # only where published splits were asked
    }
    return Inputs(params, models, curves, splits)


def _read(path: Path, reader: Callable[[Path], Any], stage: str) -> Any:
    try:
        found = reader(path)
    except FileNotFoundError:
        raise ReportError(f"{path} is missing; run `dvc repro {stage}` first") from None
    except ValueError as error:
        raise ReportError(f"{error}; run `dvc repro -f -s {stage}` to make it anew") from error
    if not found:
        raise ReportError(f"{path} is empty; run `dvc repro -f -s {stage}` to make it anew")
    return found


def _read_steps(path: Path) -> list[dict[str, float]]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: a line is not JSON ({error.msg})") from error


def build(inputs: Inputs) -> tuple[list[Block], dict[str, Any]]:
    """The page's blocks, and the figures of metrics.json."""
    results = [result for found in inputs.models.values() for result in found]
    greedy = [result for result in results if not result.temperature]
    budgets = sorted({result.budget for result in greedy})
    temperatures = sorted({result.temperature for result in results} - {0.0})
    kinds = [kind for kind in KINDS if kind == "all" or any(r.question_type == kind for r in greedy)]

    accuracies = [figures.accuracy(budget, kind) for budget in budgets for kind in kinds]
    behaviours = [figures.compliance(t) for t in temperatures]
    behaviours += [figures.format_reward(t) for t in temperatures]
    behaviours += [figures.tool_calls(0.0, budget) for budget in budgets]
    behaviours += [figures.tool_calls(t) for t in temperatures]
    scores = [compare(measure, [inputs.models]) for measure in accuracies]
    habits = [compare(measure, [inputs.models]) for measure in behaviours]
    claims = figures.claims([inputs.models])
    blocks: list[Block] = [
        Heading(TITLE, 1),
        Paragraph(_lead(inputs, budgets)),
        Heading("What this run shows"),
        Bullets([claim_sentence(claim) for claim in claims]),
        Paragraph(CAVEAT),
        Heading("Accuracy"),
        comparison_table(scores, ACCURACY),
        accuracy_figure(scores, budgets),
        Heading("Format and tool use"),
        comparison_table(habits, BEHAVIOUR),
        Heading("What became of the questions"),
        count_table(inputs.models, budgets, temperatures, COUNTS),
        *_published(inputs.splits),
        Heading("Training"),
        *curve_figures(inputs.curves),
        Heading("How it was made"),
        Bullets(_made(inputs.params)),
    ]
    return blocks, _metrics(scores + habits, claims)


def _published(splits: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """The published splits that were asked, beside the published table."""
    if not published.run_columns(splits):
        return []
    return [
        Heading("Beside the published table"),
        Table(*published.side_by_side(splits), f"Published: {published.SOURCE}. {published.BRACKETS}"),
        Table(*published.states(splits), COUNTS),
        Bullets(published.protocols(splits)),
    ]


def write_report(target: Path, blocks: Sequence[Block], metrics: Mapping[str, Any]) -> None:
    """All files of the report, or none."""

    def write(folder: Path) -> None:
        write_markdown(folder, blocks)
        (folder / "report.html").write_text(to_html(TITLE, blocks), encoding="utf-8")
        write_json(folder / "metrics.json", metrics)

    publish(target, write)


def _lead(inputs: Inputs, budgets: Sequence[int]) -> str:
    params = inputs.params
    asked = len({result.id for result in inputs.models["base"] if not result.temperature})
    return (
        "One model at three stages: as it was given (base), after a supervised cold start (SFT), and after "
        f"reinforcement learning (PARA-GRPO). Scale `{params.scale}`, method `{params.method}`, seed "
        f"{params.seed}; {asked} held-out questions, each asked with {listed(budgets)} overview frames (K)."
    )


def _made(params: Params) -> list[str]:
    sft, grpo, episode = params.sft, params.grpo, params.episode
    drawn = "drawn per prompt" if params.budget.gating else "of which the largest is used, gating being off"
    items = [
        f"SFT: {sft.steps} steps of {sft.batch_size} traces, learning rate {sft.optimiser.learning_rate:g}.",
        f"PARA-GRPO: {grpo.steps} steps of {grpo.prompts_per_step} prompts x {grpo.group_size} episodes, "
        f"learning rate {grpo.optimiser.learning_rate:g}, anchoring `{params.anchoring.scope}` with weight "
        f"{params.anchoring.weight:g}, frame budgets {listed(params.budget.choices)}, {drawn}.",
        f"Episodes: mode `{episode.mode}`, dispatch `{episode.dispatch}`, at most {episode.max_turns} tool "
        f"turns of {episode.calls_per_turn} calls; training samples at temperature {episode.temperature:g}.",
    ]
    return items if params.scale == "paravt_8b" else [*items, STAND_IN]


def _metrics(rows: Sequence[Comparison], claims: Sequence[Claim]) -> dict[str, Any]:
    models: dict[str, Any] = {name: {} for name in NAMES}
    differences: dict[str, Any] = {}
    for row in rows:
        for name in NAMES:
            models[name][row.measure.key] = row.intervals[name].to_json()
        for (first, second), found in row.differences.items():
            if found is not None:
                differences.setdefault(f"{second}_minus_{first}", {})[row.measure.key] = found.to_json()
    return {
        "models": models,
        "differences": differences,
        "claims": {claim.key: claim.verdict for claim in claims},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("report"):
        params = parameters.load()
        with stage_run("report", params) as reporter:
            _stage(params, reporter)
    return 0


def _stage(params: Params, reporter: StageReporter) -> None:
    target = REPORTS / "report"
    blocks, metrics = build(read_inputs(REPORTS, params))
    write_report(target, blocks, metrics)
    reporter.plots(sorted((target / "plots").glob("*.png")))
    for name in ("report.html", "report.md"):
        reporter.artifact(target / name)
    for block in blocks:
        if isinstance(block, Bullets):
            print("\n".join(block.items))
            break
    print(f"report: {target / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
