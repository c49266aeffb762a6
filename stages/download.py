"""Bring what the pipeline starts from: the needle world, published data, and the base model.

Reads params.yaml (base_model, data, visual, budget) and the folder that base_model names. Renders the
needle world to data/needles (videos/*.mp4, sft.jsonl, rl.jsonl, eval.jsonl) and copies the model to
models/base. Where data.needles.source_dir holds videos, RL and evaluation questions are written into their
frames, and data/needles/sources.json says which are used. With data.hub the published tables come to
data/hub, their media and the model's weights to the media root (PARAVT_MEDIA_ROOT, or data/media); without
it data/hub holds an empty manifest. A published checkpoint after SFT, if data.hub.sft_model names one, comes
to models/published_sft. Each folder appears whole or not at all, and what a stopped run has downloaded is
not downloaded again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys

from paravt.checkpoints import publish
from paravt.config import FOOTAGE, Params
from paravt.data.media import folder_name, write_manifest
from paravt.data.needle_tables import write_tables
from paravt.data.sources import SUFFIXES, Sources, find_sources
from paravt.model import check_folder
from stages import params as parameters
from stages import published
from stages.command import command
from stages.tracking import StageReporter, stage_run

DATA, MODEL, PUBLISHED_SFT = Path("data/needles"), Path("models/base"), Path("models/published_sft")
NONE_NAMED = "data.hub.sft_model names no checkpoint.\n"


def download(params: Params, reporter: StageReporter) -> None:
    hub = params.data.hub
    if hub and hub.model:
        source = published.FOLDER / folder_name(hub.model.repository)
    else:
        source = check_folder(params.base_model)

    def render(folder: Path) -> None:
        sources = _sources(params)
        counts = write_tables(
            folder,
            DATA.as_posix(),
            params.data.needles,
            params.visual,
            params.budget.choices,
            params.data.seed,
            sources,
        )
        told = {f"rows/{table}": count for table, count in counts.items()}
        told["videos"] = len(list((folder / "videos").iterdir()))
        if sources:
            told |= {"sources/used": len(sources.used), "sources/left_out": len(sources.left_out)}
            for name, reason in sources.left_out.items():
                print(f"download: {name} is left out: {reason}", file=sys.stderr)
        reporter.summary(told)

    def fetch(folder: Path) -> None:
        if hub is None:
            return write_manifest(folder / published.MANIFEST, [])
        report = published.bring(hub, folder, reporter)
        reporter.summary({f"media/{name}": count for name, count in report["media"].items()})
        for line in published.notes(report):
            print(f"download: {line}", file=sys.stderr)

    def after_sft(folder: Path) -> None:
        if hub and hub.sft_model:
            copy(published.FOLDER / folder_name(hub.sft_model.repository), folder)
        else:
            (folder / "README.md").write_text(NONE_NAMED, encoding="utf-8")

    publish(DATA, render)
    publish(published.FOLDER, fetch)
    publish(MODEL, lambda folder: copy(source, folder))
    publish(PUBLISHED_SFT, after_sft)


def copy(source: Path, folder: Path) -> None:
    """File by file: the source may hold links or read-only files, the copy holds plain ones."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _sources(params: Params) -> Sources | None:
    """The videos to write into; None while the folder of the default is away or holds none.

    Raises ValueError for any other folder without videos.
    """
    needles = params.data.needles
    if needles.source_dir == FOOTAGE and not Path(FOOTAGE).exists():
        return None
    sources = find_sources(Path(needles.source_dir), needles.needle_s[1], params.visual.read_timeout_s)
    if sources is None and needles.source_dir != FOOTAGE:
        raise ValueError(
            f"data.needles.source_dir {needles.source_dir} holds no video ({', '.join(SUFFIXES)}); "
            f"put some there, or write {FOOTAGE}"
        )
    return sources


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.download",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("download"):
        params = parameters.load()
        with stage_run("download", params) as reporter:
            download(params, reporter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
