"""Fill the media root of this machine with what the tables and models name.

Reads data/hub/manifest.jsonl (or data/prepared/media.jsonl, or the manifests given) and weights.json of the
models in models/. Writes to the media root: PARAVT_MEDIA_ROOT, or data/media. Files that are there already
are not asked for; each one that comes is compared with the manifest's checksum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from paravt.data.media import media_root
from paravt.reporter import LogReporter
from stages.command import command, fail
from stages.supply import MANIFESTS, ensure, named


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.media",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("manifests", nargs="*", type=Path, help="manifest files")
    parser.add_argument("--workers", type=int, default=4, help="files at a time (%(default)s)")
    options = parser.parse_args(arguments)
    with command("media"):
        for path in options.manifests:
            if not path.is_file():
                fail("media", f"{path} is missing; it comes with `dvc pull` or `dvc repro download`")
        files = named(options.manifests or MANIFESTS)
        if not files:
            fail("media", "no manifest is here; run `dvc pull data/hub` or `dvc repro download` first")
        came = ensure(files, LogReporter(), options.workers)
        print(f"media: {came} files fetched, {len(files) - came} were in {media_root()} already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
