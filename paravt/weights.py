"""A model folder whose weights lie elsewhere.

    FOLDER/config.json, tokenizer.json, ...    the small files
    FOLDER/weights.json                        {"repository", "revision", "files": {name: {"sha256", "size"}}}

Weights of billions of parameters are no output of a stage: the folder names them, the media root holds them.
`real_folder` gives a folder in which both stand side by side, as every library wants it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
import shutil

from paravt.data.media import MediaFile, MediaStore, folder_name, media_root, sha256_of

REFERENCE = "weights.json"


class WeightsError(ValueError):
    """Weights that are named and not there; the message says what to run."""


def write_reference(folder: Path, files: list[MediaFile]) -> None:
    """Name `files` as the weights of `folder`."""
    named = {file.path: {"sha256": file.sha256, "size": file.size} for file in files}
    data = {"repository": files[0].repository, "revision": files[0].revision, "files": named}
    (folder / REFERENCE).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def referenced(folder: str | Path) -> list[MediaFile]:
    """The weights that a folder names; none if it holds its own. Raises WeightsError if it cannot be read."""
    reference = Path(folder) / REFERENCE
    if not reference.is_file():
        return []
    try:
        data = json.loads(reference.read_text(encoding="utf-8"))
        return [
            MediaFile(data["repository"], data["revision"], path, item["size"], item["sha256"], kind="model")
            for path, item in data["files"].items()
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{reference} is no list of weights ({error}); download it again") from None


def real_folder(folder: str | Path, root: str | Path | None = None) -> Path:
    """`folder` itself, or a folder under the media root that holds its small files and links to its weights.

    Raises WeightsError if weights are missing there.
    """
    folder = Path(folder)
    files = referenced(folder)
    if not files:
        return folder
    store = MediaStore(media_root() if root is None else root)
    for file in files:
        if fault := store.lacks(file):
            raise WeightsError(
                f"{folder}: {file.path} of {file.repository} in {store.root}: {fault}; "
                "run `python -m stages.media` to fetch it"
            )
    small = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != REFERENCE
    }
    content = "".join(f"{name} {sha256_of(path)}\n" for name, path in small.items())
    key = hashlib.sha256((content + (folder / REFERENCE).read_text(encoding="utf-8")).encode()).hexdigest()
    target = store.root / "models" / f"{folder_name(files[0].repository)}-{key[:12]}"
    for name, path in small.items():
        place = target / name
        if not place.is_file():
            aside = store.scratch()
            shutil.copyfile(path, aside)
            place.parent.mkdir(parents=True, exist_ok=True)
            aside.replace(place)
    for file in files:
        place = target / file.path
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            aside = store.scratch()
            aside.symlink_to(store.blob(file.sha256).resolve())
            aside.replace(place)
    return target
