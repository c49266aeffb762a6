"""The published data on this machine: tables in a folder, media and weights in the media root.

    fetch_tables      tables of a repository -> FOLDER/owner__name/path
    fetch_media       wanted files of a repository, packed or plain -> the media root
    fetch_model       a model -> FOLDER with its small files, its weights in the media root
    fetch_benchmarks  tables and media of benchmarks by name

Each resolves its revision to a commit, looks at the licence and the free space before it moves a byte, takes
up what an earlier run left, and says what it brought as manifest rows. Nothing that is there is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
import json
import logging
from pathlib import Path, PurePosixPath
import shutil
from typing import Any
from urllib.parse import unquote

from paravt.data.catalogue import Catalogue, at_once, bring, check_disk, matches, read_catalogue
from paravt.data.media import MediaFile, MediaStore, folder_name
from paravt.data.patience import HubError
from paravt.data.published import SOURCES, Source
from paravt.data.transfer import Client, Remote, RemoteFile, online
from paravt.reporter import Reporter
from paravt.weights import write_reference

log = logging.getLogger("paravt")

UNKNOWN = "unknown"
KNOWN_LICENCES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-sa-4.0", UNKNOWN)
WEIGHTS = ("*.safetensors",)
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "README.md", "LICENSE")


@dataclass
class Hub:
    """Context manager. `workers` files at a time; `licences` are those that the caller accepts, None any."""

    root: Path
    reporter: Reporter | None = None
    workers: int = 4
    keep_free_gib: float = 5.0
    licences: Sequence[str] | None = KNOWN_LICENCES
    wait_s: float = 1.0
    opened: dict[tuple[str, str, str], Remote] = field(default_factory=dict)
    """Every repository that was opened, by name, kind and revision."""

    def __enter__(self) -> Hub:
        self._stack = ExitStack()
        self._stack.enter_context(online())
        self.client = Client(MediaStore(self.root), self.reporter, self.wait_s)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(
        self, repository: str, kind: str = "dataset", revision: str = "main", moved_to: Sequence[str] = ()
    ) -> Remote:
        """The repository at a commit. Raises HubError if it cannot be had or its licence is not accepted."""
        key = (repository, kind, revision)
        if key in self.opened:
            return self.opened[key]
        remote = self.client.open(repository, kind, revision, tuple(moved_to))
        licence = licence_of(remote)
        if self.licences is not None and licence not in self.licences:
            raise HubError(
                f"{repository} is under licence {licence!r}, which is not among those accepted "
                f"({', '.join(self.licences)}); if your use fits it, add it to data.hub.licences "
                "(of `paravt eval fetch`: --licences)"
            )
        self.opened[key] = remote
        return remote

    def fetch_tables(self, remote: Remote, patterns: Sequence[str], folder: Path) -> list[Path]:
        """The files that match, as folder/owner__name/path. Raises HubError if none does."""
        files = self._matching(remote, patterns)
        target = folder / folder_name(remote.repository)
        at_once(lambda file: self._place(remote, file, target), files, self.workers, self.client.stop)
        return [target / file.path for file in files]

    def catalogue(self, remote: Remote, archives: Sequence[str], files: Sequence[str] = ()) -> Catalogue:
        """What the matching archives and files hold, without downloading them."""
        return read_catalogue(self.client, remote, archives, files, self.workers)

    def fetch_media(self, catalogue: Catalogue, wanted: Iterable[str]) -> list[MediaFile]:
        """Bring the wanted paths; what cannot be had is in `catalogue.problems`. Raises HubError."""
        return bring(self.client, catalogue, wanted, self.workers, self.keep_free_gib)

    def fetch_model(self, remote: Remote, folder: Path) -> list[MediaFile]:
        """Fill `folder` with the model's small files and a reference to its weights. Raises HubError."""
        weights = self._matching(remote, WEIGHTS)
        small = [file for file in self._matching(remote, MODEL_FILES) if "/" not in file.path]
        found = self._bring(remote, weights)
        at_once(lambda file: self._place(remote, file, folder), small, self.workers, self.client.stop)
        write_reference(folder, found)
        return found

    def refetch(self, files: Iterable[MediaFile]) -> list[MediaFile]:
        """Bring what the rows of a manifest name and this root lacks; returns those rows that it still lacks.

        This is how another machine fills its own root: from the same commits, checked against the manifest.
        """
        store = self.client.store
        groups: dict[tuple[str, str, str], list[MediaFile]] = {}
        for file in files:
            if store.lacks(file):
                groups.setdefault((file.repository, file.kind, file.revision), []).append(file)
        left: list[MediaFile] = []
        for (repository, kind, revision), rows in groups.items():
            moved = next((s.moved_to for s in SOURCES.values() if s.repository == repository), ())
            remote = self.open(repository, kind, revision, moved)
            archives = sorted({row.archive for row in rows if row.archive})
            held = Catalogue(remote)
            if archives:
                held = self.catalogue(remote, [f"{name}*" for name in archives])
            held.plain = {row.path: remote.files[row.path] for row in rows if row.path in remote.files}
            self.fetch_media(held, [row.path for row in rows])
            left += [row for row in rows if store.lacks(row)]
        return left

    def _bring(self, remote: Remote, files: Sequence[RemoteFile]) -> list[MediaFile]:
        plain = Catalogue(remote, plain={file.path: file for file in files})
        return self.fetch_media(plain, plain.plain)

    def _matching(self, remote: Remote, patterns: Sequence[str]) -> list[RemoteFile]:
        files = [file for path, file in remote.files.items() if matches(path, patterns)]
        if not files:
            wanted = " or ".join(patterns)
            raise HubError(f"{remote.repository} has no {wanted} at {remote.commit}; check the revision")
        return files

    def _place(self, remote: Remote, file: RemoteFile, target: Path) -> None:
        """Copy a file to where it is read; it stays in the media root, so the next run does not ask again."""
        blob = self.client.blob(remote, file)
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blob, place)


def licence_of(remote: Remote) -> str:
    """What the repository's card says, `unknown` if it says nothing."""
    licence: Any = remote.licence
    if isinstance(licence, list):
        return " and ".join(map(str, licence)) or UNKNOWN
    return str(licence) if licence else UNKNOWN


@dataclass
class Fetched:
    """What a benchmark brought: table files, media rows, and rows of the table whose media are not there."""

    name: str
    tables: list[Path]
    media: list[MediaFile]
    rows: int
    missing: list[str]
    problems: dict[str, str]


def fetch_benchmark(
    hub: Hub, source: Source, folder: Path, rows: int | None = None, revision: str | None = None
) -> Fetched:
    """Tables to `folder`, media of the first `rows` rows of each table to the media root."""
    remote = hub.open(source.repository, "dataset", revision or source.revision, source.moved_to)
    tables = hub.fetch_tables(remote, source.tables, folder)
    asked = [value for table in tables for value in media_names(table, source.media_columns, rows)]
    names = list(dict.fromkeys(name for row in asked for name in row))
    catalogue = hub.catalogue(remote, source.archives, source.files)
    wanted, missing = find_media(names, catalogue.paths)
    media = hub.fetch_media(catalogue, wanted)
    return Fetched(source.name, tables, media, len(asked), missing, catalogue.problems)


def fetch_benchmarks(
    names: Sequence[str],
    folder: Path,
    root: Path,
    rows: int | None = None,
    reporter: Reporter | None = None,
    workers: int = 4,
    licences: Sequence[str] = KNOWN_LICENCES,
) -> list[MediaFile]:
    """Tables and media of benchmarks by name, for those who evaluate without the pipeline.

    Raises HubError in one sentence, also for a licence that is not among `licences`; ValueError for a benchmark that is not known.
    """
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise ValueError(f"no published benchmark is called {unknown[0]!r}; use one of {', '.join(SOURCES)}")
    with Hub(root, reporter, workers, licences=licences) as hub:
        return [file for name in names for file in fetch_benchmark(hub, SOURCES[name], folder, rows).media]


def media_names(table: Path, columns: Sequence[str], rows: int | None) -> list[list[str]]:
    """What the first rows of a parquet or JSON table say about their media, a list a row."""
    if table.suffix == ".parquet":
        import pyarrow.parquet as parquet

        read = parquet.read_table(table)
        found = read.select([name for name in columns if name in read.column_names]).to_pylist()
    else:
        found = json.loads(table.read_text(encoding="utf-8"))
    if not found or not any(name in found[0] for name in columns):
        raise HubError(
            f"{table.name} has no rows with {' or '.join(columns)}; its layout is not the published"
        )
    return [[row[name] for name in columns if isinstance(row.get(name), str)] for row in found[:rows]]


def find_media(names: Sequence[str], paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """(paths that the names mean, names that mean none).

    A name may be a file name, a stem, a path, or the address of a file on the hub; all files with its stem
    are meant, so that a video's subtitles come with it.
    """
    by_stem: dict[str, list[str]] = {}
    every = set(paths)
    for path in every:
        by_stem.setdefault(PurePosixPath(path).stem, []).append(path)
    wanted: set[str] = set()
    missing = []
    for name in names:
        inside = unquote(name.split("/resolve/", 1)[1].partition("/")[2]) if "/resolve/" in name else name
        if inside in every:
            found = [inside]
        else:
            last = PurePosixPath(inside)
            stem = last.stem if last.suffix.lower() in _SUFFIXES else last.name
            found = [] if inside != name else by_stem.get(stem, [])
        wanted.update(found)
        if not found:
            missing.append(name)
    return sorted(wanted), missing


_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".json", ".srt")

__all__ = [
    "Fetched",
    "Hub",
    "HubError",
    "check_disk",
    "fetch_benchmark",
    "fetch_benchmarks",
    "find_media",
    "licence_of",
    "media_names",
]
