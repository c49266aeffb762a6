"""`make seeds`: the pipeline once per training seed, and one table over all of them.

    python -m flows.seeds [1 2 3]

The seeds share data, base model and questions; training and sampling differ. Each seed is an ordinary
`dvc repro` with its own run in tracking, so a seed that is done comes from DVC's cache when the command is
started again. params.yaml is put back at the end, and so are the outputs that belong to it.

Writes docs/seeds.md (the table, each claim with its interval over questions and seeds, and the difference of
each seed) and docs/seeds.json (the mean of each measure by seed and model). Neither holds a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys
from typing import Any

from flows.repro import repro
from flows.run_stage import stop_all
from paravt.benchmarks.results import read_results
from stages import environment, figures
from stages import params as parameters
from stages.command import command, fail
from stages.document import Bullets, Heading, Paragraph, Table, to_markdown
from stages.figures import Claim, Comparison, Run
from stages.outputs import write_json
from stages.params import PARAMS_FILE, canonical, check, compose, dump, flatten
from stages.tables import claim_sentence, comparison_table, listed, number
from stages.tracking import Stopped
from stages.tracking.lifeline import lifeline

MODELS = ("base", "sft", "para_grpo")
KEPT = Path(".scratch/seeds")
DOCS = Path("docs")
TABLE = (
    "Mean over questions and seeds with 95 % intervals from a bootstrap in which both are redrawn; a "
    "difference pairs the two models question by question within a seed. Accuracy is greedy, in percent of "
    "all questions. Format compliance is in percent of episodes; f_tau is the mean format reward; tool calls "
    "really ran. For the last claim the figure is PARA-GRPO's minus half of SFT's."
)
SIGNS = "The difference behind each claim, seed by seed. A claim is shown only if all seeds agree in sign."


def run_seeds(root: Path, seeds: Sequence[int]) -> list[Run]:
    """The results of each seed, one pipeline after the other; params.yaml is as before in the end."""
    path = root / PARAMS_FILE
    before = path.read_bytes()
    data = parameters.read_yaml(path)
    runs = []
    try:
        for seed in seeds:
            values = data | {"seed": seed}
            check(values)
            path.write_text(dump(values), encoding="utf-8")
            print(f"seed {seed}", flush=True)
            if code := repro(root):
                fail("seeds", f"seed {seed} failed; run again to go on with it", code)
            runs.append(_keep(root, seed))
    finally:
        path.write_bytes(before)
    repro(root)  # the outputs of params.yaml as it stands, from the cache if it is one of the seeds
    return runs


def _keep(root: Path, seed: int) -> Run:
    """The results of the seed that has just run; a copy stays in .scratch for whoever wants to look."""
    run = {}
    for name in MODELS:
        source = root / "reports" / "evaluate" / name / "results.jsonl"
        kept = root / KEPT / str(seed) / f"{name}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, kept)
        run[name] = read_results(kept)
    return run


def measures(runs: Sequence[Run]) -> list[figures.Measure]:
    """What the table shows: accuracy and tool calls by frame budget, format by temperature."""
    results = [result for run in runs for found in run.values() for result in found]
    budgets = sorted({result.budget for result in results if not result.temperature})
    temperatures = sorted({result.temperature for result in results} - {0.0})
    return [
        *(figures.accuracy(budget, "all") for budget in budgets),
        *(figures.compliance(temperature) for temperature in temperatures),
        *(figures.format_reward(temperature) for temperature in temperatures),
        *(figures.tool_calls(0.0, budget) for budget in budgets),
        *(figures.tool_calls(temperature) for temperature in temperatures),
    ]


def summarise(
    seeds: Sequence[int], runs: Sequence[Run], settings: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """docs/seeds.md and what docs/seeds.json holds."""
    rows = [figures.compare(measure, runs) for measure in measures(runs)]
    claims = figures.claims(runs)
    blocks = [
        Heading(f"{len(seeds)} training seeds" if len(seeds) > 1 else "One training seed", 1),
        Paragraph(
            f"Training seeds {listed(seeds)}; data, base model and questions are the same. "
            f"{'; '.join(settings)}. Written by `make seeds`."
        ),
        Bullets([claim_sentence(claim) for claim in claims]),
        comparison_table(rows, TABLE),
        Table(
            ["", *(f"seed {seed}" for seed in seeds)],
            [[claim.says, *_by_seed(claim, len(seeds))] for claim in claims],
            SIGNS,
        ),
    ]
    return to_markdown(blocks), _numbers(seeds, runs, rows, claims)


def _by_seed(claim: Claim, count: int) -> list[str]:
    if claim.difference is None:
        return ["–"] * count
    return [number(value, claim.percent, signed=True) for value in claim.difference.by_seed]


def _numbers(
    seeds: Sequence[int], runs: Sequence[Run], rows: Sequence[Comparison], claims: Sequence[Claim]
) -> dict[str, Any]:
    means = {
        str(seed): {
            name: {row.measure.key: _average(row.measure.of(run[name])) for row in rows} for name in MODELS
        }
        for seed, run in zip(seeds, runs, strict=True)
    }
    verdicts = {
        claim.key: {
            "verdict": claim.verdict,
            "difference": claim.difference.to_json() if claim.difference else None,
        }
        for claim in claims
    }
    return {"seeds": list(seeds), "means": means, "claims": verdicts}


def _average(values: dict[str, float]) -> float | None:
    return round(sum(values.values()) / len(values), 6) if values else None


def settings(root: Path) -> list[str]:
    """How params.yaml differs from the composition of its scale and method, and what these are."""
    data = parameters.read_yaml(root / PARAMS_FILE)
    plain = dict(flatten(compose([f"scale={data['scale']}", f"method={data['method']}"])))
    said = [f"Scale `{data['scale']}`, method `{data['method']}`"]
    changed = [
        f"{key} {canonical(value)}"
        for key, value in flatten(data)
        if plain.get(key) != value and key != "seed"
    ]
    return said + ([f"changed: {', '.join(changed)}"] if changed else [])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.seeds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seeds", nargs="*", type=int, default=[1, 2, 3], help="training seeds (%(default)s)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    with command("seeds"):
        environment.apply(root)
        try:
            with lifeline(watch_starters=False, on_stop=stop_all):
                runs = run_seeds(root, options.seeds)
        except Stopped as stopped:
            fail("seeds", f"stopped by {stopped.signal.name}; run again to continue", 128 + stopped.signal)
        text, numbers = summarise(options.seeds, runs, settings(root))
        (root / DOCS / "seeds.md").write_text(text, encoding="utf-8")
        write_json(root / DOCS / "seeds.json", numbers)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
