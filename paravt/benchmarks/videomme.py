"""Video-MME: choices about short, medium and long videos; `videomme_wsub` puts the subtitles first.

The dataset's options carry their letters already; they are taken off and put on once, by the prompt. The id
is `question_id`: a video has three questions. Subtitles stand in order of time, up to a limit of tokens that
is part of what was asked; 156 of the 900 videos have none, and their questions are asked without.
"""

from __future__ import annotations

from typing import Any

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.benchmarks.subtitles import read_srt, shown
from paravt.benchmarks.tables import Media, UniqueIds, letter_of, questions, read_rows, texts, video_missing
from paravt.protocol import plain_options
from paravt.rollout import Sample

SOURCE = "videomme"
BY = ("duration", "task", "domain")


def load(place: Place, subtitles: bool = False) -> Questions:
    media, unique = Media(place, SOURCE), UniqueIds()

    def sample(row: dict[str, Any]) -> Sample:
        video, options = row["videoID"], plain_options(texts(row["options"]))
        meta = {"duration": row["duration"], "task": row["task_type"], "domain": row["domain"]}
        question = row["question"]
        if subtitles:
            block, meta["subtitles"] = _subtitles(media, video, place)
            question = f"{block}\n\n{question}" if block else question
        video_path = media.video(f"data/{video}.mp4", f"data/{video}.MP4", f"data/{video}.mkv")
        answer = letter_of(row["answer"], options)
        return Sample(unique(row["question_id"]), video_path, question, answer, "mcq", options, meta)

    return questions(read_rows(place, SOURCE), sample, lambda row: row["question_id"])


def load_with_subtitles(place: Place) -> Questions:
    return load(place, subtitles=True)


def _subtitles(media: Media, video: str, place: Place) -> tuple[str, str]:
    """The block that goes before the question, and how much of the subtitles it is: all, part or none."""
    path = media.find(f"subtitle/{video}.srt", suffixes=(".srt",))
    if not path.is_file():
        return "", "none"
    lines = read_srt(path.read_text(encoding="utf-8-sig", errors="replace"))
    block, count = shown(lines, place.subtitle_tokens, place.count_tokens)
    return block, "none" if not count else "all" if count == len(lines) else "part"


VIDEOMME = register(Benchmark("videomme", load, skip=video_missing, by=BY, published_rows=2700))
VIDEOMME_WSUB = register(
    Benchmark(
        "videomme_wsub",
        load_with_subtitles,
        skip=video_missing,
        by=(*BY, "subtitles"),
        published_rows=2700,
    )
)
