"""A file to exact frames at given times.

Presentation time stamps are the truth: time 0 is the first shown frame, and a frame at time t is the last one
shown at or before t. A frame depends on the file and the time alone, whatever was read before. Files are
touched only by worker processes (`video_worker`), so that opening, sampling and cropping never hang: a worker
that does not answer in time is ended, and the file reported.

    with open_video("talk.mp4") as video:
        overview = video.sample(16)             # evenly in time, first to last shown frame
        crop = video.crop(12.0, 20.0)           # 12, 13, ..., 20 s; at most 16 frames
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import queue
import subprocess
import sys
import threading
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

Reason = Literal["missing", "empty", "no_video", "undecodable", "truncated", "timeout"]
MAX_WORKERS = 2  # files that are read at the same time
TIME_SLACK_S = 1e-4  # a time that was rounded in text still means its frame
START_SLACK_S = 30.0  # a worker's first answer waits for its imports


class VideoError(RuntimeError):
    """A file that cannot be read; `reason` says why in one word, the message names the file."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Index(NamedTuple):
    """Time stamps of the shown frames, ascending, in units of `time_base` s; `end_pts` ends the last."""

    pts: np.ndarray
    time_base: float
    end_pts: int
    constant_rate: bool
    rotation: int
    truncated: bool
    keys: tuple[int, ...]
    """Stamps of key frames; empty if each frame was decoded to make the index, and seeking is not trusted."""


@dataclass(frozen=True)
class Frames:
    """Frames that were really decoded: `images` uint8 [n, H, W, 3] upright RGB, `times_s` float64 [n].

    Times are absolute in the source and ascending. `window_s` is what was asked for, cut to the video;
    `clamped` says that it was cut.
    """

    images: np.ndarray
    times_s: np.ndarray
    window_s: tuple[float, float]
    clamped: bool


class Video:
    """An opened file; made by `open_video`."""

    def __init__(self, path: str, timeout_s: float, allow_truncated: bool) -> None:
        self.path = path
        self._timeout_s = timeout_s
        index = _WORKERS.ask(path, "index", (), timeout_s)
        if index.truncated and not allow_truncated:
            raise VideoError("truncated", f"{path}: cut off after {len(index.pts)} good frames")
        first = index.pts[0]
        self._constant_rate = index.constant_rate
        self.times_s: np.ndarray = np.round((index.pts - first) * index.time_base, 9)
        """Presentation time of each shown frame, float64, ascending from 0."""
        self.duration_s: float = round(float((index.end_pts - first) * index.time_base), 9)
        """The end of the last shown frame."""

    @property
    def frame_count(self) -> int:
        return len(self.times_s)

    def frames_at(self, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
        """uint8 [n, H, W, 3]: for each time, in the order given, the last frame shown at or before it.

        A time before the first frame means the first. Raises VideoError.
        """
        positions = self._positions(times_s)
        unique, order = np.unique(positions, return_inverse=True)
        return self._read(unique)[order]

    def sample(self, n: int) -> Frames:
        """At most `n` frames spread evenly from the first to the last shown frame, both included."""
        times_s = self.times_s
        if self._constant_rate:
            positions = np.round(np.linspace(0, len(times_s) - 1, min(n, len(times_s)))).astype(int)
        else:
            positions = self._positions(np.linspace(0.0, times_s[-1], min(n, len(times_s))))
        return self._frames(np.unique(positions), (0.0, self.duration_s), False)

    def crop(self, start_s: float, end_s: float, fps: float = 1.0, max_frames: int = 16) -> Frames:
        """Frames at start, start + 1/fps, ... up to end; `max_frames` spread evenly if those are too many."""
        return self.crops([(start_s, end_s)], fps, max_frames)[0]

    def crops(
        self, windows: Sequence[tuple[float, float]], fps: float = 1.0, max_frames: int = 16
    ) -> list[Frames]:
        """A crop for each window, in the order given, read in one ascending pass over the file."""
        cut = [(max(0.0, start_s), min(end_s, self.duration_s)) for start_s, end_s in windows]
        positions = [np.unique(self._positions(crop_times_s(*window, fps, max_frames))) for window in cut]
        unique = np.unique(np.concatenate(positions)) if positions else np.array([], dtype=int)
        images = self._read(unique)
        crops = []
        for asked, window, mine in zip(windows, cut, positions, strict=True):
            chosen = images[np.searchsorted(unique, mine)]
            crops.append(Frames(chosen, self.times_s[mine], window, tuple(asked) != window))
        return crops

    def _positions(self, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
        times_s = np.asarray(times_s, dtype=np.float64)
        positions = np.searchsorted(self.times_s, times_s + TIME_SLACK_S, side="right") - 1
        return np.clip(positions, 0, self.frame_count - 1)

    def _read(self, positions: np.ndarray) -> np.ndarray:
        if not len(positions):
            return np.zeros((0, 0, 0, 3), dtype=np.uint8)
        return _WORKERS.ask(self.path, "frames", (positions.tolist(),), self._timeout_s)

    def _frames(self, positions: np.ndarray, window_s: tuple[float, float], clamped: bool) -> Frames:
        return Frames(self._read(positions), self.times_s[positions], window_s, clamped)


def crop_times_s(start_s: float, end_s: float, fps: float, max_frames: int) -> np.ndarray:
    """start, start + 1/fps, ... up to end; `max_frames` times spread evenly if more would fit.

    Raises ValueError for a window without length.
    """
    if not end_s > start_s:
        raise ValueError(f"the window {start_s} to {end_s} s has no length")
    count = int((end_s - start_s) * fps + 1e-6) + 1
    if count > max_frames:
        return np.linspace(start_s, end_s, max_frames)
    return start_s + np.arange(count) / fps


@contextmanager
def open_video(
    path_or_uri: str | Path, timeout_s: float = 60.0, allow_truncated: bool = False
) -> Iterator[Video]:
    """Open a file by path or `file://` URI (decoded once); a path with `%20` in its name is opened as it is.

    Raises VideoError. A file that is cut off is refused unless `allow_truncated`: then its good frames count.
    """
    yield Video(local_path(path_or_uri), timeout_s, allow_truncated)


def local_path(path_or_uri: str | Path) -> str:
    """The plain path. A `file://` prefix before a path that exists as written is only cut off."""
    text = os.fspath(path_or_uri)
    if not text.startswith("file://"):
        return text
    raw = text.removeprefix("file://")
    return raw if Path(raw).exists() else unquote(urlsplit(text).path)


class _Worker:
    """One child process and the pipes to it."""

    def __init__(self) -> None:
        from multiprocessing.connection import Connection

        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from paravt.video_worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which closes the pipes
        )
        self.requests = Connection(os.dup(self.process.stdin.fileno()), readable=False)
        self.answers = Connection(os.dup(self.process.stdout.fileno()), writable=False)
        self.process.stdin.close()
        self.process.stdout.close()
        self.answered = False

    def ask(self, message: tuple, timeout_s: float) -> tuple[bool, Any]:
        """Raises TimeoutError or OSError (EOFError too); the worker is of no use then."""
        self.requests.send(message)
        if not self.answers.poll(timeout_s + (0 if self.answered else START_SLACK_S)):
            raise TimeoutError
        self.answered = True
        return self.answers.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.requests.close()
        self.answers.close()


class _Workers:
    """At most MAX_WORKERS children of this process, started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """After a fork the parent's children are not ours."""
        self._owner = os.getpid()
        self._started: list[_Worker] = []
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(MAX_WORKERS):
            self._idle.put(None)

    def ask(self, path: str, request: str, arguments: tuple, timeout_s: float) -> Any:
        with self._lock:
            if self._owner != os.getpid():
                self._forget()
        worker = self._idle.get()
        if worker is not None and worker.process.poll() is not None:  # it died while it had nothing to do
            self._started.remove(worker)
            worker.end()
            worker = None
        try:
            if worker is None:
                worker = _Worker()
                self._started.append(worker)
            good, value = worker.ask((os.path.abspath(path), request, arguments), timeout_s)
        except (TimeoutError, EOFError, OSError) as error:
            self._started.remove(worker)
            worker.end()
            worker = None
            if isinstance(error, TimeoutError):
                words = f"{path}: the reader did not answer within {timeout_s:g} s and was ended"
                raise VideoError("timeout", words) from error
            raise VideoError("undecodable", f"{path}: the reader died on this file") from error
        except BaseException:
            if worker is not None:  # interrupted: its next answer would be another's
                self._started.remove(worker)
                worker.end()
                worker = None
            raise
        finally:
            self._idle.put(worker)
        if not good:
            reason, words = value
            raise VideoError(reason, f"{path}: {words}")
        return value

    def end(self) -> None:
        if self._owner == os.getpid():
            for worker in self._started:
                worker.end()
            self._forget()


_WORKERS = _Workers()
atexit.register(_WORKERS.end)
