"""A start with other habits: `python -m stages.study.base NAME` writes study/starts/NAME.

models/tiny-base goes on with its pretraining under the habits that study/arms.yaml names, and is then cold
started by SFT as in the pipeline. What differs between two starts is thus the habit, not the ability: clips
and SFT traces are the same. Reads models/base, data/prepared/sft.jsonl with its
videos, study/arms.yaml and conf/. A run that was killed goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys

from stages import pretrain_tiny
from stages.command import command
from stages.definition import dvc_hash
from stages.params import ParamsError, digest
from stages.sft import BASE, cold_start
from stages.study.arms import FILE, HOME, SCRATCH, Base, read_study
from stages.tracking import stage_run

LEARNING_RATE = 3e-4  # a fifth of pretraining's peak: habits move, abilities stay


def teach_habits(base: Base, work: Path, target: Path) -> None:
    """models/base after `base.steps` more steps of pretraining, in the folder `target`."""
    words = ["--start", BASE, "--out", target, "--work", work, "--clips", base.clips, "--steps", base.steps]
    words += ["--looseness", base.looseness, "--tool-share", base.tool_share]
    words += ["--learning-rate", LEARNING_RATE, "--warmup", 10]
    pretrain_tiny.train(pretrain_tiny.parse([str(word) for word in words]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.study.base",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="a base of study/arms.yaml")
    options = parser.parse_args(arguments)
    with command(f"study base {options.base}"):
        study = read_study(Path.cwd())
        if options.base not in study.bases:
            raise ParamsError(f"{FILE} has no base {options.base!r}; it has {', '.join(study.bases)}")
        base, params = study.bases[options.base], study.params("para_grpo", 1)
        key = digest(params, vars(base), dvc_hash(BASE), dvc_hash(Path("data/prepared")))
        home = SCRATCH / f"base-{options.base}-{key}"
        with stage_run(f"study-base-{options.base}", params) as reporter:
            taught = home / "taught"
            if not taught.is_dir():
                teach_habits(base, home / "pretraining", home / "taught.part")
                (home / "taught.part").rename(taught)
            cold_start(params, reporter, home / "sft", taught, HOME / "starts" / options.base)
    shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
