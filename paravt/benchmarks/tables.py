"""What the loaders of published benchmarks share: rows of a table, files of a repository, options of a text.

A row that is no question (its gold answer names no option, a field is missing) is set aside with the reason
and counted; it is never dropped and never asked. Ids are made unique, since a question counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
import json
from pathlib import Path, PurePosixPath
import re
from typing import Any

from paravt.benchmarks.registry import Place, Questions
from paravt.data.media import folder_name, media_path, media_root, on_this_machine, resolve_media
from paravt.data.published import SOURCES
from paravt.rollout import LETTERS, Sample, SampleError

VIDEO_SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".avi", ".mov")


class RowError(ValueError):
    """A row that is no question; the message says why."""


def read_rows(place: Place, source: str) -> list[dict[str, Any]]:
    """The rows of a source's tables, in order of file name.

    Raises FileNotFoundError that says how to get them, ValueError for a table without rows.
    """
    published = SOURCES[source]
    folder = place.tables / folder_name(published.repository)
    files = sorted(
        path
        for path in (folder.rglob("*") if folder.is_dir() else ())
        if any(fnmatch(path.relative_to(folder).as_posix(), pattern) for pattern in published.tables)
    )
    if not files:
        wanted = " or ".join(published.tables)
        raise FileNotFoundError(f"{folder} holds no {wanted}; run `paravt eval fetch --benchmarks {source}`")
    rows = [row for file in files for row in _rows_of(file)]
    if not rows:
        raise ValueError(f"{files[0]} holds no rows; fetch {source} again")
    return rows


def _rows_of(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return parquet.read_table(file).to_pylist()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


def questions(
    rows: Sequence[dict[str, Any]],
    make: Callable[[dict[str, Any]], Sample],
    name: Callable[[dict[str, Any]], str],
) -> Questions:
    """One sample per row by `make`; a row that it refuses is set aside under `name(row)`.

    A missing field is a row that cannot be read, unless it is missing in the first row too: then the layout
    is not the published one, which is a ValueError.
    """
    found = Questions([], len(rows))
    for number, row in enumerate(rows):
        try:
            found.samples.append(make(row))
        except KeyError as error:
            if number == 0:
                raise ValueError(
                    f"the table has no column {error}; its layout is not the published one"
                ) from error
            _set_aside(found, row, number, name, f"no field {error}")
        except (RowError, SampleError, TypeError, ValueError) as error:
            _set_aside(found, row, number, name, str(error))
    return found


def _set_aside(
    found: Questions, row: dict[str, Any], number: int, name: Callable[[dict], str], why: str
) -> None:
    try:
        label = name(row)
    except (KeyError, TypeError):
        label = "row"
    found.set_aside[f"{label} (row {number})"] = why


class UniqueIds:
    """Gives each id once: a second use of one gets `#2`."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def __call__(self, value: str) -> str:
        self._seen[value] = self._seen.get(value, 0) + 1
        return value if self._seen[value] == 1 else f"{value}#{self._seen[value]}"


class Media:
    """The files of one repository under the media root."""

    def __init__(self, place: Place, source: str) -> None:
        self.root, self.repository = place.media, SOURCES[source].repository
        self._by_stem: dict[str, list[Path]] | None = None

    def video(self, *paths: str) -> str:
        """How a sample names the video that is found: with the usual media root `data/media/owner__name/...`,
        the same on every machine.
        """
        found = self.find(*paths)
        if self.root == media_root():
            inside = found.relative_to(self.root / folder_name(self.repository))
            return media_path(self.repository, inside.as_posix())
        return str(found)

    def find(self, *paths: str, suffixes: Sequence[str] = VIDEO_SUFFIXES) -> Path:
        """The first of `paths` that is here; else the one file whose stem is theirs, wherever it lies.

        Without any, where the first of `paths` would be: the question will be skipped, and say so.
        """
        try:
            places = [resolve_media(self.root, self.repository, path) for path in paths]
        except ValueError as error:
            raise RowError(f"its media path cannot be used: {error}") from error
        for path in places:
            if path.is_file():
                return path
        stem = PurePosixPath(paths[0]).stem
        found = [path for path in self._stems().get(stem, ()) if path.suffix in suffixes]
        return found[0] if len(found) == 1 else places[0]

    def _stems(self) -> dict[str, list[Path]]:
        if self._by_stem is None:
            self._by_stem = {}
            folder = self.root / folder_name(self.repository)
            for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
                self._by_stem.setdefault(path.stem, []).append(path)
        return self._by_stem


def video_missing(sample: Sample) -> str | None:
    """Why a question about a video that is not on this machine is skipped."""
    path = Path(on_this_machine(sample.video))
    return None if path.is_file() else f"the video {path.name} is not on this machine"


_OPTION = re.compile(r"(?:^|\n)[ \t]*(?:\(([A-J])\)|([A-J])[.):])[ \t]*")


def split_options(text: str) -> tuple[str, tuple[str, ...]] | None:
    """(question, options) of a text that ends in lines "(A) ...", "(B) ..."; None if it does not.

    The letters must run from A without a gap, one a line, and the last run counts: a question may quote an
    earlier one.
    """
    marks = list(_OPTION.finditer(text))
    letters = [match[1] or match[2] for match in marks]
    starts = [place for place, letter in enumerate(letters) if letter == "A"]
    if not starts:
        return None
    marks, letters = marks[starts[-1] :], letters[starts[-1] :]
    if len(letters) < 2 or "".join(letters) != LETTERS[: len(letters)]:
        return None
    ends = [match.start() for match in marks[1:]] + [len(text)]
    options = [" ".join(text[match.end() : end].split()) for match, end in zip(marks, ends, strict=True)]
    question = text[: marks[0].start()].strip()
    return (question, tuple(options)) if question and all(options) else None


def letter_of(answer: Any, options: Sequence[str]) -> str:
    """The letter of a gold answer that is a letter, "(B)" or an option's text. Raises RowError."""
    text = str(answer).strip()
    bare = text.strip("().: ")
    if len(bare) == 1 and bare in LETTERS[: len(options)]:
        return bare
    said = " ".join(text.casefold().split())
    for letter, option in zip(LETTERS, options, strict=False):
        if " ".join(option.casefold().split()) == said:
            return letter
    raise RowError(f"the gold answer {text[:60]!r} is none of its {len(options)} options")


def texts(values: Iterable[Any]) -> tuple[str, ...]:
    """Option texts without blanks around them. Raises RowError for an option that is no text."""
    found = tuple(values)
    if not all(isinstance(value, str) for value in found):
        raise RowError("an option is no text")
    return tuple(value.strip() for value in found)
