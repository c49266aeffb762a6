"""Evaluate one model on the needle split: `python -m stages.evaluate base|sft|para_grpo`.

Reads models/NAME, data/prepared/eval.jsonl and params.yaml. Asks each question greedily at each frame budget
of evaluate.budgets, and samples episodes at evaluate.format_temperatures for format compliance and the mean
format reward. Writes to reports/evaluate/NAME, all of it without times:

    results.jsonl    one line a question
    metrics.json     all figures, with intervals and counts
    headline.json    the few that `dvc metrics` shows
    benchmarks/      where evaluate.benchmarks names published splits (tables in data/hub)

Answers are kept in .scratch/evaluate/NAME.jsonl as they come; a run that was stopped goes on from there.
Ends with 1 if more than evaluate.max_error_share of the questions failed or were skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any

from paravt import benchmarks
from paravt.benchmarks import Benchmark, Place
from paravt.benchmarks.results import Result, ResultStore, write_results
from paravt.benchmarks.runner import Asking, agent_ask, code_version, folder_hash, run
from paravt.benchmarks.summary import accuracy_table, behaviour, counts, error_share, reasons
from paravt.checkpoints import publish
from paravt.config import Params, RewardConfig
from paravt.hashing import stable_hash
from paravt.judge import judge_of
from paravt.local import open_model
from paravt.reporter import Reporter
from paravt.rollout import Sample
from stages import params as parameters
from stages.benchmarks import VERDICTS, copy_results, engine_of, evaluate_published
from stages.command import command, fail
from stages.definition import dvc_hash
from stages.headline import COLUMNS, TABLE, bare, headline, table
from stages.outputs import write_json
from stages.tracking import StageReporter, stage_run

NAMES = ("base", "sft", "para_grpo")
LOCK = Path("requirements/core.lock")
PREPARED, REPORTS, SCRATCH = Path("data/prepared"), Path("reports/evaluate"), Path(".scratch/evaluate")


def evaluate(
    params: Params,
    model: Path,
    benchmark: Benchmark,
    samples: Sequence[Sample],
    store: Path,
    reporter: Reporter,
) -> list[Result]:
    """All results: greedy ones by frame budget, then sampled ones by temperature, each in table order."""
    from paravt.engines.limits import PromptLimits

    weights, kept = folder_hash(model), ResultStore(store)
    # engines draw other samples from the same distribution: an answer is kept for the one that gave it
    code = f"{code_version()}-{engine_of(params.engine)}-{installed()}"
    # Arms train on different format rewards; they are judged by one.
    scoring = RewardConfig(open_ended=params.reward.open_ended, judge_model=params.reward.judge_model)
    judge = judge_of(scoring, VERDICTS)
    besides = {"judge": judge.identity} if judge else {}
    limits = PromptLimits.of(params.episode, params.visual, max(params.evaluate.budgets))
    results: list[Result] = []
    with open_model(model, params.visual, params.engine, limits) as (engine, encoder):
        for temperature, budget, asked in plan(params, samples):
            episode = params.episode.model_copy(update={"temperature": temperature})
            asking = Asking(episode, params.visual, scoring, params.seed, weights, code, besides)
            ask = agent_ask(engine, encoder, asking)
            results += run(benchmark, asked, budget, asking, ask, kept, reporter, judge=judge)
    return results


def installed() -> str:
    """The hash of the locked environment: other libraries may answer otherwise."""
    return dvc_hash(LOCK) or "unlocked"


def plan(params: Params, samples: Sequence[Sample]) -> list[tuple[float, int, list[Sample]]]:
    """(temperature, frame budget, questions): greedy at each budget, then each format temperature.

    A format question gets one budget, drawn by a hash of seed and id, so that budgets are mixed alike for
    each model and temperature.
    """
    config = params.evaluate
    asked = [(0.0, budget, list(samples[: config.questions_per_budget])) for budget in config.budgets]
    for temperature in config.format_temperatures:
        for place, budget in enumerate(config.budgets):
            mine = [
                sample
                for sample in samples[: config.format_questions]
                if stable_hash(params.seed, "format budget", sample.id) % len(config.budgets) == place
            ]
            asked.append((temperature, budget, mine))
    return asked


def metrics_of(results: Sequence[Result]) -> dict[str, Any]:
    """metrics.json: accuracy by budget and type, behaviour greedy and by temperature, counts."""
    greedy = [result for result in results if result.temperature == 0]
    sampled = {f"t{t:g}": [r for r in results if r.temperature == t] for t in _temperatures(results)}
    return {
        "accuracy": accuracy_table(greedy),
        "greedy": {
            f"k{budget}": behaviour([r for r in greedy if r.budget == budget])
            | {"counts": counts_at(greedy, budget)}
            for budget in sorted({r.budget for r in greedy})
        },
        "sampled": {name: behaviour(part) | {"counts": counts(part)} for name, part in sampled.items()},
        "counts": counts(results),
        "error_share": round(error_share(results), 10),
    }


def counts_at(results: Sequence[Result], budget: int) -> dict[str, int]:
    """The counts of one frame budget."""
    return counts([result for result in results if result.budget == budget])


def _temperatures(results: Sequence[Result]) -> list[float]:
    return sorted({result.temperature for result in results} - {0.0})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, float | None]:
    """Nested figures as one level, for tracking: {"accuracy/k4/all/strict": 0.5}."""
    found: dict[str, float | None] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            found[f"{prefix}{key}"] = float(value)
    return found


def write_outputs(
    target: Path,
    results: Sequence[Result],
    metrics: dict[str, Any],
    figures: dict[str, float | None],
    published: Path | None = None,
) -> None:
    """results.jsonl, `metrics` as metrics.json, `figures` as headline.json and, from `published`,
    benchmarks/: all or none.
    """

    def write(folder: Path) -> None:
        write_results(folder / "results.jsonl", results)
        write_json(folder / "metrics.json", metrics)
        write_json(folder / "headline.json", bare(figures))
        if published is not None:
            copy_results(published, folder / "benchmarks")

    publish(target, write)


def complaint(results: Sequence[Result], allowed: float) -> str | None:
    """One sentence if too many questions failed or were skipped, else None."""
    share = error_share(results)
    if share <= allowed:
        return None
    lost = sum(counts(results)[state] for state in ("failed", "skipped"))
    reason, times = next(iter(reasons(results).items()), ("nothing was asked", 0))
    return (
        f"{lost} of {len(results)} questions failed or were skipped ({share:.1%}, allowed "
        f"{allowed:.1%}), most often ({times}): {reason}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, help="which model: the folder models/NAME")
    parser.add_argument("--benchmark", default="needles", choices=benchmarks.names(), help="(%(default)s)")
    options = parser.parse_args(arguments)

    name = f"evaluate@{options.name}"
    with command(name):
        params = parameters.load()
        with stage_run(name, params) as reporter:
            model, benchmark = Path("models") / options.name, benchmarks.get(options.benchmark)
            evaluate_into(REPORTS / options.name, options.name, model, benchmark, params, reporter)
    return 0


def evaluate_into(
    target: Path, name: str, model: Path, benchmark: Benchmark, params: Params, reporter: StageReporter
) -> list[Result]:
    """Ask `model` everything, tell `reporter`, write the outputs to `target`; the needle results.

    `name` is whose answers are kept in .scratch/evaluate. Raises SystemExit if too many questions failed.
    """
    samples = benchmark.load(Place(needles=PREPARED)).samples
    reporter.know(samples)
    results = evaluate(params, model, benchmark, samples, SCRATCH / f"{name}.jsonl", reporter)
    metrics, figures = metrics_of(results), headline(results)
    reporter.summary(flat(metrics) | figures)
    reporter.table(COLUMNS, table(results), TABLE)
    if words := complaint(results, params.evaluate.max_error_share):
        SCRATCH.mkdir(parents=True, exist_ok=True)
        write_results(SCRATCH / f"{name}.failed.jsonl", results)
        fail(f"evaluate@{name}", f"{words}; all are in {SCRATCH / f'{name}.failed.jsonl'}")
    write_outputs(target, results, metrics, figures, _published(name, model, params, reporter))
    for budget, parts in metrics["accuracy"].items():
        shown = ", ".join(f"{kind} {part['strict']:.3f}" for kind, part in parts.items())
        print(f"evaluate@{name}: {budget}: {shown}")
    return results


def _published(name: str, model: Path, params: Params, reporter: StageReporter) -> Path | None:
    """Ask evaluate.benchmarks; the folder with what they gave, None if there are none."""
    if not params.evaluate.benchmarks:
        return None
    home = SCRATCH / f"{name}-benchmarks"
    found = evaluate_published(params, model, home, reporter, installed())
    for benchmark, (results, figures) in found.items():
        score = figures["headline"]["strict"]
        if score is not None:
            reporter.summary({f"benchmarks/{benchmark}/strict": score})
        print(f"evaluate@{name}: {benchmark}: {figures['measure']} {score}")
        if words := complaint(results, params.evaluate.max_error_share):
            fail(f"evaluate@{name}", f"{benchmark}: {words}; all are in {home / f'{benchmark}.jsonl'}")
    return home


if __name__ == "__main__":
    sys.exit(main())
