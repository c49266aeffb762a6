"""Post-train by PARA-GRPO: episodes with parallel crops, rewards, group advantages, anchors.

Reads params.yaml (seed, visual, budget, episode, reward, anchoring, grpo, engine), data/prepared/rl.jsonl
with the videos it names, and models/sft. Writes the trained model to models/para_grpo and its curves to
reports/para_grpo. What a killed run needs to go on lies in .scratch/; start it again and it ends with the
same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import TYPE_CHECKING

from paravt.checkpoints import publish
from paravt.config import Params
from paravt.rollout import read_samples
from stages import params as parameters
from stages.command import command
from stages.tracking import StageReporter, stage_run

if TYPE_CHECKING:
    from paravt.training import TrainResult

DATA, START = Path("data/prepared/rl.jsonl"), Path("models/sft")
MODEL, REPORT = Path("models/para_grpo"), Path("reports/para_grpo")


def para_grpo(params: Params, reporter: StageReporter) -> None:
    from stages.curves import write_curves

    result = post_train(params, reporter, reporter.scratch.folder, MODEL)
    publish(REPORT, lambda folder: write_curves(folder, result))


def post_train(params: Params, reporter: StageReporter, scratch: Path, target: Path) -> TrainResult:
    """Train models/sft on data/prepared/rl.jsonl, from the last checkpoint in `scratch` if there is one; the
    trained model's folder is `target`, whole or absent.
    """
    from paravt.engines.factory import make_engine
    from paravt.engines.limits import PromptLimits
    from paravt.grpo import GRPOSetup, train
    from paravt.model import load_encoder, load_model
    from paravt.training import write_model_folder

    samples = read_samples(DATA)
    reporter.know(samples)
    model = load_model(START)
    encoder = load_encoder(START, params.visual)
    setup = GRPOSetup.of(params)
    limits = PromptLimits.of(params.episode, params.visual, max(params.budget.choices))
    # in this process the engine samples from the very weights that are trained
    with make_engine(params.engine, START, encoder, limits, model, log_folder=scratch / "vllm") as engine:
        result = train(model, None, engine, encoder, samples, setup, reporter, scratch)
        reporter.summary({f"engine/{what}": times for what, times in sorted(engine.counts.items())})
    write_model_folder(model, START, target)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.para_grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("para_grpo"):
        params = parameters.load()
        with stage_run("para_grpo", params) as reporter:
            para_grpo(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
