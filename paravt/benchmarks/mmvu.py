"""MMVU, validation: expert questions, 625 choices and 375 open ones.

An open question is scored as one (token F1, exact match or a judge's verdict, as configured), never as a
choice whose letter is a text. `open_ended: leave_out` sets them aside. The headline is over the choices: the
published figure can only have been over them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.tables import (
    Media,
    RowError,
    UniqueIds,
    letter_of,
    questions,
    read_rows,
    texts,
    video_missing,
)
from paravt.rollout import LETTERS, Sample

SOURCE = "mmvu"


def load(place: Place) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        kind = {"multiple-choice": "mcq", "open-ended": "oe"}.get(row["question_type"])
        if kind is None:
            raise RowError(f"question_type {row['question_type']!r} is not known")
        if kind == "oe" and place.open_ended == "leave_out":
            raise RowError("an open question, left out by the option open_ended")
        options = _options(row["choices"]) if kind == "mcq" else ()
        answer = letter_of(row["answer"], options) if kind == "mcq" else str(row["answer"]).strip()
        if not answer:
            raise RowError("the gold answer is empty")
        subject = (row.get("metadata") or {}).get("subject") or "unknown"
        meta = {"type": "choice" if kind == "mcq" else "open", "subject": subject}
        video_path = media.video(_path(row["video"]))
        return Sample(unique(row["id"]), video_path, row["question"], answer, kind, options, meta)

    return questions(read_rows(place, SOURCE), sample, lambda row: row["id"])


def _options(choices: dict[str, str]) -> tuple[str, ...]:
    """The texts of A, B, ... up to the last one that is not empty; one that is empty in between is kept."""
    options = [choices.get(letter) or "" for letter in LETTERS]
    while options and not options[-1].strip():
        options.pop()
    return texts(options)


def _path(address: str) -> str:
    """The path in the repository: what follows the revision in the address of a file on the hub."""
    return unquote(address.split("/resolve/", 1)[1].partition("/")[2]) if "/resolve/" in address else address


MMVU = register(
    Benchmark("mmvu", load, skip=video_missing, by=("type", "subject"), headline="mcq", published_rows=1000)
)
