"""Charades-STA, test: when does what the caption says happen? Scored by temporal IoU and R@{0.3, 0.5, 0.7}.

The table holds times as float16, whose steps are 0.016 to 0.031 s: they are rounded to the tenth of a second
that the annotators wrote.
"""

from __future__ import annotations

from typing import Any

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.tables import Media, RowError, UniqueIds, questions, read_rows, video_missing
from paravt.rollout import Sample

SOURCE = "charades"
FOLDER = "Charades_v1_480"


def load(place: Place) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        start_s, end_s = (round(float(time_s), 1) for time_s in row["timestamp"])
        if not 0 <= start_s < end_s:
            raise RowError(f"its span {start_s} to {end_s} s is empty or inverted")
        video, caption = row["video"], " ".join(row["caption"].split())
        if not caption:
            raise RowError("its caption is empty")
        video_path = media.video(f"{FOLDER}/{video}", video)
        name = unique(video.removesuffix(".mp4"))
        question = f'When does this happen in the video: "{caption}"'
        return Sample(name, video_path, question, (start_s, end_s), "tvg", (), {"caption": caption})

    return questions(read_rows(place, SOURCE), sample, lambda row: row["video"])


CHARADES = register(Benchmark("charades", load, skip=video_missing, published_rows=3720))
