"""Cold start: teach the base model the format on traces.

Reads params.yaml (seed, visual, episode, sft), data/prepared/sft.jsonl with the videos it names, and
models/base. Writes the trained model to models/sft and its curves to reports/sft. What a killed run needs to
go on lies in .scratch/; start it again and it ends with the same weights.
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
from stages.tracking import StageReporter, stage_run

DATA, BASE = Path("data/prepared/sft.jsonl"), Path("models/base")
MODEL, REPORT = Path("models/sft"), Path("reports/sft")


def sft(params: Params, reporter: StageReporter) -> None:
    from paravt.data.schema import read_traces
    from paravt.model import load_encoder, load_model
    from paravt.sft import SFTSetup, train
    from paravt.training import write_model_folder
    from stages.curves import write_curves

    traces = read_traces(DATA)
    model = load_model(BASE)
    encoder = load_encoder(BASE, params.visual)
    result = train(model, encoder, traces, SFTSetup.of(params), reporter, reporter.scratch.folder)
    publish(REPORT, lambda folder: write_curves(folder, result))
    write_model_folder(model, BASE, MODEL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    with command("sft"):
        params = parameters.load()
        with stage_run("sft", params) as reporter:
            sft(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
