"""Tables of the seven splits as they are published, with made rows: types, spellings and traps included."""

from __future__ import annotations

import json
from pathlib import Path
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from paravt.benchmarks import Place
from paravt.data.media import folder_name, resolve_media
from paravt.data.published import SOURCES

SRT = """\ufeff1
00:00:01,000 --> 00:00:02,500
<font color="white" size=".72c">Two &amp; two</font>

2
00:00:00,200 --> 00:00:01,000
<font color="white">first
in time</font>

3
00:00:02,500 --> 00:00:04,000
<font>Two &amp; two</font>
"""


def videomme_row(number: int, **changes) -> dict:
    return {
        "video_id": f"{number // 3:03}",
        "duration": ("short", "medium", "long")[number // 3 % 3],
        "domain": "Knowledge",
        "sub_category": "Astronomy",
        "url": "https://www.youtube.com/watch?v=x",
        "videoID": f"vid{number // 3}",
        "question_id": f"{number // 3:03}-{number % 3 + 1}",
        "task_type": ("Counting", "Temporal Reasoning")[number % 2],
        "question": "What does the woman pick up first?",
        "options": ["A. A cup.", "B. A key.", "C. A map.", "D. A coin."],
        "answer": "ABCD"[number % 4],
    } | changes


def longvideobench_row(number: int, **changes) -> dict:
    return {
        "video_id": f"lv{number}",
        "id": f"lv{number}_0",
        "video_path": f"lv{number}.mp4",
        "subtitle_path": f"lv{number}_en.json",
        "correct_choice": number % 3,
        "question": "At the moment the man in red sits, what is on the table?",
        "option0": "a lamp",
        "option1": "a cup",
        "option2": "a book",
        "option3": "N/A",
        "option4": "N/A",
        "duration": 187.0,
        "duration_group": (15, 60, 600, 3600)[number % 4],
        "question_category": "S2O",
        "topic_category": "KH-Knowledge-History",
        "starting_timestamp_for_subtitles": 421.5,
    } | changes


def lvbench_row(number: int, **changes) -> dict:
    return {
        "key": f"lb{number // 2}",
        "type": "cartoon",
        "video_path": f"lb{number // 2}.mp4",
        "uid": str(1200 + number),
        "question": "What year is shown?\n(A) 1631\n(B) 1632\n(C) 1633\n(D) 1634",
        "answer": "ABCD"[number % 4],
        "question_type": ["entity recognition", "reasoning"][: 1 + number % 2],
        "time_reference": "00:15-00:19",
    } | changes


def mlvu_row(number: int, **changes) -> dict:
    return {
        "video_name": f"needle_{number}" + ".mp4" * (number % 2),
        "duration": 612.4,
        "question": "What colour is the car?\n(A) red\n(B) blue\n(C) white\n(D) black",
        "candidates": ["red", "blue", "white", "black"],
        "answer": "ABCD"[number % 4],
        "task_type": ("plotQA", "needle", "ego")[number % 3],
        "question_id": f"Q{number}",
    } | changes


def mmvu_row(number: int, **changes) -> dict:
    row = {
        "id": f"validation_{number}",
        "video": f"https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Art/{number}.mp4",
        "youtube_url": "https://www.youtube.com/watch?v=x",
        "question_type": "multiple-choice",
        "metadata": {"subject": "Art", "textbook": "", "rationale": "", "knowledge": []},
        "question": "Which law explains it?",
        "choices": {"A": "Ohm", "B": "Hooke", "C": "Snell", "D": "Boyle", "E": "Hess"},
        "answer": "ABCDE"[number % 5],
    }
    if number % 3 == 2:
        row |= {
            "question_type": "open-ended",
            "choices": dict.fromkeys("ABCDE", ""),
            "answer": "surface tension",
        }
    return row | changes


def charades_row(number: int, **changes) -> dict:
    return {
        "video": f"AB12{number // 2}.mp4",
        "caption": "a person opens a window.",
        "timestamp": [24.296875, 30.40625],
    } | changes


MAKERS = {
    "videomme": videomme_row,
    "longvideobench": longvideobench_row,
    "lvbench": lvbench_row,
    "mlvu": mlvu_row,
    "mmvu": mmvu_row,
    "charades": charades_row,
}
FILES = {
    "videomme": "videomme/test-00000-of-00001.parquet",
    "longvideobench": "validation-00000-of-00001.parquet",
    "lvbench": "data/train-00000-of-00001.parquet",
    "mlvu": "mlvu/test-00000-of-00001.parquet",
    "mmvu": "validation.json",
    "charades": "data/test-00000-of-00001.parquet",
}
MEDIA = {
    "videomme": "data/{videoID}.mp4",
    "longvideobench": "videos/{video_path}",
    "lvbench": "{key}.mp4",
    "mlvu": "{video_name}",
    "mmvu": "videos/Art/{id}.mp4",
    "charades": "Charades_v1_480/{video}",
}


def place_in(folder: Path, **options) -> Place:
    return Place(tables=folder / "hub", media=folder / "media", needles=folder / "needles", **options)


def write_table(place: Place, name: str, rows: list[dict]) -> Path:
    """The table of a split in its repository's folder."""
    path = place.tables / folder_name(SOURCES[name].repository) / FILES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
        return path
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    if name == "charades":
        halves = [np.asarray(span, dtype=np.float16) for span in columns["timestamp"]]
        columns["timestamp"] = pa.array(halves, pa.list_(pa.float16()))
    parquet.write_table(pa.table(columns), path)
    return path


def write_media(place: Place, name: str, path: str, source: Path) -> Path:
    """A file of a split in the media root."""
    target = resolve_media(place.media, SOURCES[name].repository, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


def write_split(place: Place, name: str, count: int, clip: Path) -> list[dict]:
    """`count` rows of a split with a clip for each of their videos; returns the rows."""
    rows = [MAKERS[name](number) for number in range(count)]
    write_table(place, name, rows)
    for row in rows:
        path = MEDIA[name].format_map(row)
        if name == "mlvu" and not path.endswith(".mp4"):
            path += ".mp4"
        if name == "mmvu":
            path = row["video"].partition("/main/")[2]
        write_media(place, name, path, clip)
    return rows
