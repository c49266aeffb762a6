"""MLVU, the development split: seven kinds of choices about long videos.

    micro = right / all questions        macro = mean over the seven kinds of (right / questions of the kind)

The published table has the micro score, lmms-eval the macro one; both are reported. A gold answer may be a
letter or the text of an option. The question holds the options once more: they are cut off there. Rows whose
gold answer is none of the options are set aside.
"""

from __future__ import annotations

from typing import Any

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.tables import (
    Media,
    UniqueIds,
    letter_of,
    questions,
    read_rows,
    split_options,
    texts,
    video_missing,
)
from paravt.protocol import plain_options
from paravt.rollout import Sample

SOURCE = "mlvu"
SAME_KIND = {"findNeedle": "needle"}


def load(place: Place) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        options = plain_options(texts(row["candidates"]))
        parts = split_options(row["question"])
        question = parts[0] if parts and len(parts[1]) == len(options) else row["question"].strip()
        kind = row["task_type"]
        name = row["video_name"] if row["video_name"].endswith(".mp4") else f"{row['video_name']}.mp4"
        answer = letter_of(row["answer"], options)
        meta = {"task": SAME_KIND.get(kind, kind)}
        video_path = media.video(name, f"video/{name}", f"videos/{name}")
        return Sample(unique(row["question_id"]), video_path, question, answer, "mcq", options, meta)

    return questions(read_rows(place, SOURCE), sample, lambda row: row["question_id"])


MLVU = register(Benchmark("mlvu", load, skip=video_missing, by=("task",), macro="task", published_rows=2174))
