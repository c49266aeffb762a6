"""Cold start: teach the base model the format on traces.

Reads params.yaml (seed, visual, episode, sft), data/prepared/sft.jsonl with the videos it names, report.json
beside it for the card, and models/base. Writes the trained model to models/sft and its curves to reports/sft.
What a killed run needs to go on lies in .scratch/; start it again and it ends with the same weights. `train`
says how many processes work on it; they are started from here.

With `sft.source: hub` nothing is trained: models/sft is the checkpoint that data.hub.sft_model names, as the
download stage brought it to models/published_sft, and the curves are empty.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys
from typing import TYPE_CHECKING

from paravt.checkpoints import publish
from paravt.config import Params
from stages import params as parameters
from stages.command import command
from stages.launch import Follower, shared_run, spread
from stages.tracking import StageReporter

if TYPE_CHECKING:
    from paravt.training import TrainResult

DATA, BASE, PUBLISHED = Path("data/prepared/sft.jsonl"), Path("models/base"), Path("models/published_sft")
MODEL, REPORT = Path("models/sft"), Path("reports/sft")


def sft(params: Params, reporter: StageReporter | Follower) -> None:
    if params.sft.source == "hub":
        take_published(params)
        return
    from paravt.parallel import is_first
    from stages.curves import write_curves

    result = cold_start(params, reporter, reporter.scratch.folder, BASE, MODEL)
    if is_first():
        publish(REPORT, lambda folder: write_curves(folder, result))


def take_published(params: Params) -> None:
    """The published checkpoint in place of a trained one; its weights stay in the media root."""
    from paravt.model import check_folder
    from stages.curves import write_no_curves

    check_folder(PUBLISHED)
    publish(MODEL, lambda folder: shutil.copytree(PUBLISHED, folder, dirs_exist_ok=True))
    publish(REPORT, lambda folder: write_no_curves(folder, ("loss", "token_accuracy")))
    print(f"sft: models/sft is {params.data.hub.sft_model.repository}; nothing was trained")


def cold_start(
    params: Params, reporter: StageReporter | Follower, scratch: Path, base: Path, target: Path
) -> TrainResult:
    """Train the model in `base` on data/prepared/sft.jsonl, from the last checkpoint in `scratch` if there is
    one; the trained model's folder is `target`, whole or absent.
    """
    import torch

    from paravt.card import read_source, write_card
    from paravt.data.schema import read_traces
    from paravt.export import write_model_folder
    from paravt.model import load_encoder, load_model
    from paravt.sft import SFTSetup, train

    traces = read_traces(DATA)
    dtype = getattr(torch, params.train.dtype)
    model = load_model(base, dtype, params.train.attention)
    encoder = load_encoder(base, params.visual)
    result = train(model, encoder, traces, SFTSetup.of(params), reporter, scratch)
    source = read_source(DATA.with_name("report.json"))
    write_model_folder(model, base, target, dtype, lambda folder: write_card(folder, params, "sft", source))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    with command("sft"):
        params = parameters.load()
        if params.sft.source == "traces":
            spread("stages.sft", params.train, params.train.processes)
        with shared_run("sft", params) as reporter:
            sft(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
