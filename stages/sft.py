"""Cold start: teach the base model the format on traces.

Reads params.yaml (seed, visual, episode, sft), data/prepared/sft.jsonl with the videos it names, and
models/base. Writes the trained model to models/sft and its curves to reports/sft. What a killed run needs
to go on lies in .scratch/; start it again and it ends with the same weights. `train` says how many
processes work on it; they are started from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from paravt.checkpoints import publish
from paravt.config import Params
from stages import params as parameters
from stages.command import command
from stages.launch import Follower, shared_run, spread
from stages.tracking import StageReporter

DATA, BASE = Path("data/prepared/sft.jsonl"), Path("models/base")
MODEL, REPORT = Path("models/sft"), Path("reports/sft")


def sft(params: Params, reporter: StageReporter | Follower) -> None:
    import torch

    from paravt.data.schema import read_traces
    from paravt.model import load_encoder, load_model
    from paravt.parallel import is_first
    from paravt.sft import SFTSetup, train
    from paravt.training import write_model_folder
    from stages.curves import write_curves

    traces = read_traces(DATA)
    dtype = getattr(torch, params.train.dtype)
    model = load_model(BASE, dtype, params.train.attention)
    encoder = load_encoder(BASE, params.visual)
    result = train(model, encoder, traces, SFTSetup.of(params), reporter, reporter.scratch.folder)
    if is_first():
        publish(REPORT, lambda folder: write_curves(folder, result))
    write_model_folder(model, BASE, MODEL, dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    with command("sft"):
        params = parameters.load()
        spread("stages.sft", params.train)
        with shared_run("sft", params) as reporter:
            sft(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
