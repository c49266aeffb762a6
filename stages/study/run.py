"""One run of the study: `python -m stages.study.run ARM SEED`, or `base`, `sft` or a base's name for a start.

An arm trains its start (models/sft, if it names none) by PARA-GRPO under its overrides of conf/
(study/arms.yaml), then answers the questions of the evaluation stage: greedily at each frame budget, and
sampled for format compliance. The trained weights are not kept; study/results/ARM-SEED.json holds a value per
question and per step.

Reads study/arms.yaml, conf/, data/prepared/{rl,eval}.jsonl with their videos and the start. A run that was
killed goes on from its last checkpoint and from the answers it has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys

from paravt import benchmarks
from paravt.benchmarks import Place
from paravt.config import Params
from stages.command import command, fail
from stages.definition import dvc_hash
from stages.evaluate import PREPARED, complaint, evaluate, flat, metrics_of
from stages.headline import COLUMNS, TABLE, headline, table
from stages.para_grpo import post_train
from stages.params import digest
from stages.study.arms import RESULTS, SCRATCH, Arm, read_study
from stages.study.record import Record, read_curves, write_record
from stages.tracking import StageReporter, stage_run

EVALUATION_SEED = 1  # the same frame budgets and draws for every run, whatever seed it was trained with


def run(arm: Arm, seed: int, params: Params, reporter: StageReporter) -> Record:
    """Train and ask one arm, or only ask a start; what study/results keeps of it."""
    home = SCRATCH / f"{arm.name}-{seed}-{_fingerprint(arm, params)}"
    model, curves = arm.start, {}
    if arm.trained:
        model = home / "model"
        if not model.is_dir():
            post_train(params, reporter, home / "training", arm.start, model)
        curves = read_curves(home / "training" / "metrics.jsonl")
    needles = benchmarks.get("needles")
    samples = needles.load(Place(needles=PREPARED)).samples
    asked_alike = params.model_copy(update={"seed": EVALUATION_SEED})
    results = evaluate(asked_alike, model, needles, samples, home / "answers.jsonl", reporter)
    reporter.summary(flat(metrics_of(results)) | headline(results))
    reporter.table(COLUMNS, table(results), TABLE)
    if words := complaint(results, params.evaluate.max_error_share):
        fail(f"study {arm.name}", words)
    return Record(arm.name, seed, arm.overrides, tuple(results), curves)


def _fingerprint(arm: Arm, params: Params) -> str:
    """Two runs with the same one compute the same thing."""
    return digest(params, [dvc_hash(path) for path in (arm.start, PREPARED, Path("paravt"))])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.study.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arm", help="an arm of study/arms.yaml, or a start")
    parser.add_argument("seed", nargs="?", type=int, default=1, help="training seed (%(default)s)")
    options = parser.parse_args(arguments)
    with command(f"study {options.arm}"):
        study = read_study(Path.cwd())
        arm, params = study.arm(options.arm), study.params(options.arm, options.seed)
        with stage_run(f"study-{arm.name}", params) as reporter:
            record = run(arm, options.seed, params, reporter)
            write_record(RESULTS / f"{arm.name}-{options.seed}.json", record)
    for folder in SCRATCH.glob(f"{arm.name}-{options.seed}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
