"""Published media and weights that this machine lacks, brought to its media root.

A worker that took over the outputs of other stages has their manifests, and not the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paravt.data.media import MediaFile, MediaStore, media_root, read_manifest
from paravt.reporter import LogReporter, Reporter
from paravt.weights import REFERENCE, referenced

PREPARED_MEDIA, HUB_MANIFEST = Path("data/prepared/media.jsonl"), Path("data/hub/manifest.jsonl")
MANIFESTS = (HUB_MANIFEST, PREPARED_MEDIA)
USED_BY = {"sft": PREPARED_MEDIA, "para_grpo": PREPARED_MEDIA, "evaluate": HUB_MANIFEST}


def bring(stage: str) -> None:
    """Bring what `stage` uses: media of its manifest, weights that models name. Raises as `ensure` does.

    Of the manifest of all downloads, those of benchmarks are meant.
    """
    manifest = USED_BY.get(stage)
    if manifest is None or not (manifest.is_file() or list(Path("models").glob(f"*/{REFERENCE}"))):
        return
    from paravt.data.published import BENCHMARK_REPOSITORIES

    files = named([manifest])
    if manifest == HUB_MANIFEST:
        weights = set(named([]))
        files = [file for file in files if file.repository in BENCHMARK_REPOSITORIES or file in weights]
    ensure(files)


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
