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

from paravt.data.media import MediaFile, MediaStore, media_root, read_manifest
from paravt.reporter import LogReporter, Reporter
from paravt.weights import REFERENCE, referenced
from stages.command import HUB_MANIFEST, PREPARED_MEDIA, command, fail

MANIFESTS = (HUB_MANIFEST, PREPARED_MEDIA)


def ensure(files: Sequence[MediaFile], reporter: Reporter | None = None, workers: int = 4) -> int:
    """Bring the files that this machine's root lacks; returns how many came.

    Raises ValueError if some cannot be had, HubError if the hub cannot be asked.
    """
    from paravt.data.hub import Hub

    store = MediaStore(media_root())
    lacking = [file for file in files if store.lacks(file)]
    if not lacking:
        return 0
    # their licences were looked at when the manifest was made
    with Hub(store.root, reporter or LogReporter(), workers, licences=None) as hub:
        left = hub.refetch(lacking)
    if left:
        first = f"{left[0].path} of {left[0].repository}: {store.lacks(left[0])}"
        raise ValueError(f"{len(left)} of {len(files)} media files cannot be had, first {first}")
    return len(lacking)


def named(manifests: Sequence[Path], models: Path = Path("models")) -> list[MediaFile]:
    """The files of all manifests that are there, and the weights that model folders name."""
    found = {file: None for path in manifests if path.is_file() for file in read_manifest(path)}
    for folder in sorted(path.parent for path in models.glob(f"*/{REFERENCE}")):
        found.update(dict.fromkeys(referenced(folder)))
    return list(found)


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
