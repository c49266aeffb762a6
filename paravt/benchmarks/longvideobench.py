"""LongVideoBench, validation: choices that refer to a moment of a video.

`correct_choice` counts from 0 over option0 to option4, unused ones hold "N/A". Fillers at the end are left
out; one between two options keeps its place, so that no option changes its letter.
"""

from __future__ import annotations

from typing import Any

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.tables import Media, RowError, UniqueIds, questions, read_rows, texts, video_missing
from paravt.rollout import LETTERS, Sample

SOURCE = "longvideobench"
FILLER = "N/A"


def load(place: Place) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        options, chosen = _options(row), row["correct_choice"]
        if not isinstance(chosen, int) or not 0 <= chosen < len(options) or options[chosen] == FILLER:
            raise RowError(f"correct_choice {chosen!r} is none of its {len(options)} options")
        meta = {"duration": f"{row['duration_group']} s", "task": row["question_category"]}
        video_path = media.video(f"videos/{row['video_path']}", row["video_path"])
        answer = LETTERS[chosen]
        return Sample(unique(row["id"]), video_path, row["question"], answer, "mcq", options, meta)

    return questions(read_rows(place, SOURCE), sample, lambda row: row["id"])


def _options(row: dict[str, Any]) -> tuple[str, ...]:
    given = row["candidates"] if "candidates" in row else [row[f"option{place}"] for place in range(5)]
    options = [FILLER if option is None else option for option in given]
    while options and options[-1].strip() == FILLER:
        options.pop()
    return texts(options)


LONGVIDEOBENCH = register(
    Benchmark("longvideobench", load, skip=video_missing, by=("duration", "task"), published_rows=1337)
)
