"""LVBench: choices about videos of an hour or more.

The questions lie in split `train` and hold their options as lines "(A) ..."; they are taken apart here, so
that the prompt prints them once. `time_reference` says where the answer is to be seen: it is not read at all.
A question belongs to one to three types and counts in each; questions that were not answered stay in the
denominator.
"""

from __future__ import annotations

from typing import Any

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.tables import (
    Media,
    RowError,
    UniqueIds,
    letter_of,
    questions,
    read_rows,
    split_options,
    video_missing,
)
from paravt.rollout import Sample

SOURCE = "lvbench"


def load(place: Place) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        parts = split_options(row["question"])
        if parts is None:
            raise RowError("its question holds no options (A), (B), ...")
        question, options = parts
        kinds = row["question_type"]
        meta = {"task": [kinds] if isinstance(kinds, str) else list(kinds), "video_type": row["type"]}
        video_path = media.video(f"{row['key']}.mp4", f"data/{row['key']}.mp4", f"videos/{row['key']}.mp4")
        answer = letter_of(row["answer"], options)
        return Sample(unique(str(row["uid"])), video_path, question, answer, "mcq", options, meta)

    return questions(read_rows(place, SOURCE), sample, lambda row: str(row["uid"]))


LVBENCH = register(
    Benchmark("lvbench", load, skip=video_missing, by=("task", "video_type"), published_rows=1549)
)
