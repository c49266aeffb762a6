"""The media root: files by content, seen by the paths of their repositories.

    ROOT/blobs/ab/ab12...        content, named by its SHA-256
    ROOT/owner__name/path        a relative link to its blob
    ROOT/git/cd/cd34...          a link from git's SHA-1 of a small file to its blob
    ROOT/archives/KEY...         the list of an archive's members, and what was unpacked from it
    ROOT/parts, ROOT/locks       downloads under way

ROOT is the folder that PARAVT_MEDIA_ROOT names, or data/media. Blobs and links appear by one rename each, so
a link that is there leads to a whole file, and several workers may fill one root at once. Nothing is deleted.
Tables name media as `data/media/owner__name/path` wherever the root is, so that they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
import hashlib
import json
import os
from pathlib import Path, PurePosixPath
import re
import uuid

VARIABLE = "PARAVT_MEDIA_ROOT"
PREFIX = "data/media"
_CHUNK = 2**20


@dataclass(frozen=True)
class MediaFile:
    """One line of a manifest: where a file comes from and what it is.

    `path` is the path in the repository, or the member's path in `archive`; `archive` is None for a plain
    file. `size` in bytes, `sha256` of the content; `kind` is what the hub calls the repository.
    """

    repository: str
    revision: str
    path: str
    size: int
    sha256: str
    archive: str | None = None
    kind: str = "dataset"

    def to_json(self) -> dict:
        return asdict(self)


def media_root(environ: Mapping[str, str] | None = None) -> Path:
    """The media root: PARAVT_MEDIA_ROOT, or data/media under the working folder."""
    environ = os.environ if environ is None else environ
    return Path(environ.get(VARIABLE) or PREFIX)


def folder_name(repository: str) -> str:
    """`owner/name` as one folder. Raises ValueError for anything else."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or ".." in repository:
        raise ValueError(f"{repository!r} is not a repository; write owner/name")
    return repository.replace("/", "__")


def safe_path(path: str) -> PurePosixPath:
    """A relative path that stays where it is put. Raises ValueError saying what is wrong with it."""
    parts = path.split("/")
    if not path or path != path.strip() or any(ord(character) < 32 for character in path):
        raise ValueError(f"{path!r} is empty or holds blanks at an end or control characters")
    if path.startswith("/") or "\\" in path or re.match(r"[A-Za-z]:", path):
        raise ValueError(f"{path!r} is not a relative path")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} leaves its folder")
    if any(len(os.fsencode(part)) > 255 for part in parts):
        raise ValueError(f"{path[:60]!r}... has a name of more than 255 bytes")
    return PurePosixPath(path)


def resolve_media(root: str | Path, repository: str, path: str) -> Path:
    """Where a file of a repository lies, or would lie, under `root`. Raises ValueError for an unsafe path."""
    return Path(root) / folder_name(repository) / safe_path(path)


def media_path(repository: str, path: str) -> str:
    """What a table writes for the same file, on every machine."""
    return f"{PREFIX}/{folder_name(repository)}/{safe_path(path)}"


def on_this_machine(video: str, environ: Mapping[str, str] | None = None) -> str:
    """A table's path as this machine has it: `data/media/...` is looked for in the media root."""
    if video.startswith(f"{PREFIX}/"):
        return str(media_root(environ) / video.removeprefix(f"{PREFIX}/"))
    return video


def write_manifest(path: str | Path, files: Iterable[MediaFile]) -> None:
    """One line a file, in order of repository and path."""
    ordered = sorted(set(files), key=lambda file: (file.repository, file.path, file.sha256))
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(file.to_json(), ensure_ascii=False) + "\n" for file in ordered)


def read_manifest(path: str | Path) -> list[MediaFile]:
    with open(path, encoding="utf-8") as file:
        return [MediaFile(**json.loads(line)) for line in file if line.strip()]


class MediaStore:
    """The files under one root."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256[:2] / sha256

    def part(self, key: str) -> Path:
        """Where a download of content `key` is continued."""
        return self._made(self.root / "parts" / key)

    def scratch(self) -> Path:
        """A new name for a file being written, on the disk of the blobs."""
        return self._made(self.root / "parts" / f"{uuid.uuid4().hex}.new")

    def lock(self, key: str) -> Path:
        return self._made(self.root / "locks" / f"{key}.lock")

    def listing(self, key: str) -> Path:
        return self._made(self.root / "archives" / f"{key}.json")

    def adopt(self, file: Path, sha256: str) -> Path:
        """Make a whole file on the root's disk the blob of its content."""
        target = self._made(self.blob(sha256))
        if target.exists():
            file.unlink()
        else:
            with open(file, "rb") as written:
                os.fsync(written.fileno())
            file.chmod(0o444)
            file.replace(target)
        return target

    def known(self, git_oid: str) -> str | None:
        """The SHA-256 of a small file that git names by `git_oid`, if it is here."""
        return self._target(self.root / "git" / git_oid[:2] / git_oid)

    def remember(self, git_oid: str, sha256: str) -> None:
        self._link(self.root / "git" / git_oid[:2] / git_oid, sha256)

    def show(self, repository: str, path: str, sha256: str) -> None:
        """Let the repository's path lead to the blob; one rename, so readers see the old or the new."""
        place = resolve_media(self.root, repository, path)
        if self._target(place) != sha256:
            self._link(place, sha256)

    def shown(self, repository: str, path: str) -> str | None:
        """The SHA-256 of what the repository's path leads to, None if it is not here."""
        return self._target(resolve_media(self.root, repository, path))

    def lacks(self, file: MediaFile) -> str | None:
        """Why a manifest's file cannot be used from here, None if it can."""
        sha256 = self.shown(file.repository, file.path)
        if sha256 is None:
            return "missing"
        if sha256 != file.sha256:
            return "another content than the manifest's"
        return None if self.blob(sha256).stat().st_size == file.size else "another size than the manifest's"

    def _target(self, link: Path) -> str | None:
        try:
            name = Path(os.readlink(link)).name
        except OSError:
            return None
        return name if self.blob(name).is_file() else None

    def _link(self, place: Path, sha256: str) -> None:
        self._made(place)
        aside = place.parent / f".{uuid.uuid4().hex}.link"
        aside.symlink_to(os.path.relpath(self.blob(sha256), place.parent))
        aside.replace(place)

    def _made(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file; one that is a link into a media root is not read again, its blob says it."""
    target = Path(os.path.realpath(path))
    if target.parent.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", target.name):
        return target.name
    digest = hashlib.sha256()
    with open(target, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def git_oid_of(path: str | Path) -> str:
    """Git's name of a file's content: SHA-1 over `blob SIZE\\0` and the bytes."""
    digest = hashlib.sha1(b"blob %d\0" % Path(path).stat().st_size, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
