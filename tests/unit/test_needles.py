"""The needle world: the same key gives the same world, and a video shows what its scene says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from paravt.config import NeedlesConfig
from paravt.data.needles import (
    COLOURS,
    KINDS,
    draw,
    make_question,
    make_scene,
    make_split,
    overview_times_s,
    stable_rng,
    write_video,
)
from paravt.rollout import LETTERS
from paravt.video import open_video
from stages.params import check, compose

CONFIG = NeedlesConfig(sft_count=1, rl_count=1, eval_count=1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), index=st.integers(0, 10**4))
def test_scene_is_a_function_of_its_key_and_keeps_its_rules(seed, index):
    scene = make_scene(CONFIG, seed, "rl", index)
    assert scene == make_scene(CONFIG, seed, "rl", index)
    assert len({part.colour for part in scene.parts}) == CONFIG.parts
    seen_s = overview_times_s(scene.duration_s, CONFIG.fps, 4)
    for part in scene.parts:
        assert CONFIG.part_s[0] - 0.11 <= part.end_s - part.start_s <= CONFIG.part_s[1] + 0.11
        assert part.start_s + 0.4 <= part.needle_s[0] < part.needle_s[1] <= part.end_s - 0.4
        assert 1.9 <= part.needle_s[1] - part.needle_s[0] <= 3.1
        assert any(part.start_s <= t < part.end_s for t in seen_s)  # each part shows in the smallest overview


def test_splits_differ():
    assert make_scene(CONFIG, 1, "rl", 0).parts != make_scene(CONFIG, 1, "eval", 0).parts


def test_overview_times_are_rounded_frame_positions():
    # 100 frames at 10 per second, 4 of them: positions 0, 33, 66, 99
    assert overview_times_s(10.0, 10, 4).tolist() == pytest.approx([0.0, 3.3, 6.6, 9.9])
    assert overview_times_s(0.3, 10, 16).tolist() == pytest.approx([0.0, 0.1, 0.2])


def test_video_shows_the_scene(tmp_path):
    scene = make_scene(CONFIG, 3, "eval", 0)
    write_video(scene, tmp_path / "a.mp4", CONFIG)
    write_video(scene, tmp_path / "b.mp4", CONFIG)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    with open_video(tmp_path / "a.mp4") as video:
        assert video.duration_s == pytest.approx(scene.duration_s)
        assert video.frame_count == round(scene.duration_s * CONFIG.fps)
        frames = video.frames_at(video.times_s)
    for part in scene.parts:
        before = frames[round(part.start_s * CONFIG.fps) + 1].reshape(-1, 3)
        assert np.abs(np.median(before, axis=0) - COLOURS[part.colour]).max() < 25
        middle = sum(part.needle_s) / 2
        wanted = draw(part, middle, CONFIG.size)
        white = (wanted == 255).all(-1)
        assert frames[round(middle * CONFIG.fps)][white].mean() > 180  # the shape is white where it was drawn
        assert frames[round(part.start_s * CONFIG.fps) + 1][white].mean() < 170


def test_a_scene_is_the_same_file_however_often_it_is_rendered(tmp_path):
    """Memory is churned in between: an encoder that reads what it did not write shows here."""
    scene, junk = make_scene(CONFIG, 1, "eval", 4), []
    files = set()
    for size in np.random.default_rng(0).integers(1, 400_000, 40):
        junk = [*junk[-6:], bytes(size)]
        write_video(scene, tmp_path / "a.mp4", CONFIG)
        files.add((tmp_path / "a.mp4").read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_question_answers_follow_from_the_scene(kind):
    for index in range(20):
        scene = make_scene(CONFIG, 5, "eval", index)
        sample = make_question(scene, "v.mp4", kind, 0, stable_rng("q", index))
        asked = [scene.part_of(colour) for colour in sample.meta["asked"]]
        match kind:
            case "shape":
                assert sample.options[LETTERS.index(sample.answer)] == asked[0].shape
                assert len(set(sample.options)) == 4
            case "same":
                equal = asked[0].shape == asked[1].shape
                assert sample.options[LETTERS.index(sample.answer)] == ("same" if equal else "different")
            case "when":
                assert sample.answer == asked[0].needle_s
            case "name":
                assert sample.answer == asked[0].shape


def test_split_has_unique_ids_and_one_video_for_its_questions(tmp_path):
    samples, scenes = make_split(CONFIG, 1, "rl", 10, tmp_path, "data/videos/")
    assert len(samples) == len({sample.id for sample in samples}) == 10
    assert len(scenes) == len(list(tmp_path.glob("*.mp4"))) == 3  # four questions a video
    assert {sample.video for sample in samples} == set(scenes)
    assert {sample.meta["kind"] for sample in samples} == set(KINDS)


@pytest.mark.parametrize(
    ("scale", "smallest", "largest"),
    [("tiny", (0.0, 0.15), (0.9, 1.0)), ("paravt_8b", (0.0, 0.1), (0.4, 0.7))],
)
def test_each_scale_leaves_something_to_look_for(scale, smallest, largest):
    """Share of shapes that an overview shows, at the smallest and the largest frame budget."""
    params = check(compose([f"scale={scale}"]))
    config, choices = params.data.needles, params.budget.choices

    def share(budget: int) -> float:
        shown = []
        for number in range(40):
            scene = make_scene(config, 1, "eval", number, min(choices))
            times = overview_times_s(scene.duration_s, config.fps, budget)
            shown += [any(part.shows_at(t) for t in times) for part in scene.parts]
        return sum(shown) / len(shown)

    assert smallest[0] <= share(min(choices)) <= smallest[1]
    assert largest[0] <= share(max(choices)) <= largest[1]
    seen_s = params.episode.max_calls * params.visual.crop_max_frames / params.visual.crop_fps
    assert seen_s >= config.part_s[1]  # the crops of one turn can cover any part
