"""Post-train by PARA-GRPO: episodes with parallel crops, rewards, group advantages, anchors.

Reads params.yaml (seed, visual, budget, episode, reward, anchoring, grpo, engine), data/prepared/rl.jsonl
with the videos it names, report.json beside it for the card, and models/sft. Writes the trained model to
models/para_grpo and its curves to reports/para_grpo. What a killed run needs to go on lies in .scratch/;
start it again and it ends with the same weights. `train` says how many processes work on it; they are started
from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
import sys
from typing import TYPE_CHECKING

from paravt.checkpoints import publish
from paravt.config import Params
from paravt.rollout import read_samples
from stages import params as parameters
from stages.command import command
from stages.launch import Follower, shared_run, spread
from stages.tracking import StageReporter

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration

    from paravt.chat import ChatEncoder
    from paravt.engines.base import Engine
    from paravt.training import TrainResult

DATA, START = Path("data/prepared/rl.jsonl"), Path("models/sft")
MODEL, REPORT = Path("models/para_grpo"), Path("reports/para_grpo")
VERDICTS = Path(".scratch/judge")


def para_grpo(params: Params, reporter: StageReporter | Follower) -> None:
    from paravt.parallel import is_first
    from stages.curves import write_curves

    result = post_train(params, reporter, reporter.scratch.folder, START, MODEL)
    if is_first():
        publish(REPORT, lambda folder: write_curves(folder, result))


def post_train(
    params: Params, reporter: StageReporter | Follower, scratch: Path, start: Path, target: Path
) -> TrainResult:
    """Train the model in `start` on data/prepared/rl.jsonl, from the last checkpoint in `scratch` if there is
    one; the trained model's folder is `target`, whole or absent. Raises RuntimeError if no step trained.
    """
    import torch

    from paravt.card import read_source, write_card
    from paravt.export import write_model_folder
    from paravt.grpo import GRPOSetup, train
    from paravt.grpo.checks import why_untrained
    from paravt.judge import JudgedScore, judge_of
    from paravt.model import load_encoder, load_model

    samples = read_samples(DATA)
    reporter.know(samples)
    dtype = getattr(torch, params.train.dtype)
    model = load_model(start, dtype, params.train.attention)
    encoder = load_encoder(start, params.visual)
    setup = GRPOSetup.of(params)
    judge = judge_of(params.reward, VERDICTS)
    score_fn = JudgedScore(judge, params.reward) if judge else None
    with _engine(params, start, encoder, model, scratch) as engine:
        result = train(model, None, engine, encoder, samples, setup, reporter, scratch, score_fn)
        if judge:
            reporter.summary({f"judge/{what}": times for what, times in sorted(judge.counts.items())})
        if engine is not None:
            reporter.summary({f"engine/{what}": times for what, times in sorted(engine.counts.items())})
    if words := why_untrained(result.metrics):
        raise RuntimeError(words)
    source = read_source(DATA.with_name("report.json"))
    write_model_folder(
        model, start, target, dtype, lambda folder: write_card(folder, params, "para_grpo", source)
    )
    return result


@contextmanager
def _engine(
    params: Params, start: Path, encoder: ChatEncoder, model: Qwen3VLForConditionalGeneration, scratch: Path
) -> Iterator[Engine | None]:
    """The engine of this process; None where the first one has the servers for all."""
    from paravt.engines.factory import make_engine
    from paravt.engines.limits import PromptLimits
    from paravt.parallel import is_first

    if params.engine.name != "transformers" and not is_first():
        yield None
        return
    limits = PromptLimits.of(params.episode, params.visual, max(params.budget.choices))
    shared, device = model, None
    # no process has the trained weights whole, or they change while the engine samples
    if params.train.sharding != "none" or params.grpo.staleness:
        import torch

        shared, device = None, "cuda" if torch.cuda.is_available() else None
    # else the engine samples from the very weights that are trained
    with make_engine(
        params.engine, start, encoder, limits, shared, device, log_folder=scratch / "vllm"
    ) as engine:
        yield engine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.para_grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("para_grpo"):
        params = parameters.load()
        spread("stages.para_grpo", params.train, params.train.rl_processes or params.train.processes)
        with shared_run("para_grpo", params) as reporter:
            para_grpo(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
