"""A file -> exact frames at given times.

Time 0 is the first shown frame, and the frame at time t is the last one shown at or before t. Both come from
presentation timestamps, never from a declared rate or count. A frame depends on the file and the time alone:
not on what was read before, nor in which order, thread or backend (`paravt.reading.indexing` finds the times,
`paravt.reading.decoding` the frames).

    sample(n)          n frames spread evenly in time, the first and the last shown frame included
    crop(start, end)   start, start + 1/fps, ... up to end; spread evenly if those are too many
    crops(windows)     the same for several windows, in one ascending pass over the file

Nothing here hangs: each call is answered by a reader process within `timeout_s` seconds, or that process is
ended and the call raises VideoError with reason timeout (`paravt.reading.worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import logging
import math
import os
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from paravt.reading import worker
from paravt.reading.container import VideoError
from paravt.reading.indexing import Index, is_constant
from paravt.times import TimeError, parse_window

__all__ = ["Frames", "Video", "VideoError", "file_paths", "open_video", "spellings"]

log = logging.getLogger("paravt")

SAME_TIME_S = 1e-6  # nearer times are one: start + k/fps is not exact in binary, nor are six printed digits


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames with their times.

    `images` uint8 [n, H, W, 3] upright RGB; `times_s` float64 [n], when each is first shown; `window_s` the
    part of the video asked for, cut to it; `clamped` says whether it had to be cut.
    """

    images: np.ndarray
    times_s: np.ndarray
    window_s: tuple[float, float]
    clamped: bool = False

    def __len__(self) -> int:
        return len(self.times_s)


class Video:
    """An open video; made by `open_video`, to be used as a context manager. Threads may share it.

    Every read may raise VideoError (undecodable, timeout, missing if the file is gone).
    """

    def __init__(self, index: Index, name: str, timeout_s: float) -> None:
        self._index = index
        self._name = name
        self._timeout_s = timeout_s
        self._closed = False
        self.times_s: np.ndarray = index.times_s
        """float64 [frame_count], seconds: when each shown frame is first shown; the first is 0."""
        self.times_s.flags.writeable = False

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True

    @property
    def path(self) -> str:
        """The absolute path of the file."""
        return self._index.path

    @property
    def duration_s(self) -> float:
        """The end of the last shown frame, in seconds."""
        return self._index.duration_s

    @property
    def frame_count(self) -> int:
        """How many frames are really shown."""
        return len(self.times_s)

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of an upright frame."""
        return self._index.frame_shape

    @property
    def truncated(self) -> bool:
        """Whether the file is cut off; such a file opens only with `allow_truncated`."""
        return self._index.cut

    def frames_at(self, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
        """uint8 [n, H, W, 3]: for each time the last frame shown at or before it.

        Times may come in any order and repeat. One before 0 gives the first frame, one after the end the
        last. Raises TimeError for NaN.
        """
        return self._images(self._positions_at(np.asarray(times_s, dtype=np.float64)))

    def sample(self, n: int) -> Frames:
        """min(n, frame_count) distinct frames, spread evenly in time from the first to the last shown frame.

        At a constant rate these are the frames at round(linspace(0, frame_count - 1, n)), as qwen-vl-utils
        picks them. Otherwise each is the one on screen at its even time; where several times fall into one
        long frame, its neighbours stand in, so that the count holds.
        """
        if n < 1:
            raise ValueError(f"sample({n}): ask for at least 1 frame")
        positions = spread(self._index.ticks, n)
        return Frames(self._images(positions), self.times_s[positions], (0.0, self.duration_s))

    def crop(self, start_s: float, end_s: float, fps: float = 1.0, max_frames: int = 16) -> Frames:
        """The frames at start, start + 1/fps, ... up to and at the end, without repeats; at least one.

        If those are more than `max_frames`, that many times are spread evenly from the start to the end
        instead. Times are those of the frames returned; the first may lie before the window, since
        it shows what is on screen at its start. Raises TimeError if nothing of the video lies in the window.
        """
        return self.crops([(start_s, end_s)], fps, max_frames)[0]

    def crops(
        self,
        windows: Sequence[tuple[float, float]],
        fps: float | Sequence[float] = 1.0,
        max_frames: int | Sequence[int] = 16,
    ) -> list[Frames]:
        """`crop` for each window, in their order. The file is opened once and read in one ascending pass.

        `fps` and `max_frames` are those of all windows, or one for each.
        """
        rates = np.broadcast_to(np.asarray(fps, dtype=np.float64), len(windows)).tolist()
        limits = np.broadcast_to(np.asarray(max_frames), len(windows)).tolist()
        for rate, limit in zip(rates, limits, strict=True):
            if not (math.isfinite(rate) and rate > 0) or limit < 1:
                raise ValueError(f"crops need fps > 0 and max_frames >= 1, not {rate} and {limit}")
        cuts = [parse_window(start, end, self.duration_s) for start, end in windows]
        times = [
            crop_times_s(cut.start_s, cut.end_s, rate, limit)
            for cut, rate, limit in zip(cuts, rates, limits, strict=True)
        ]
        wanted = [np.unique(self._positions_at(asked)) for asked in times]
        together = np.unique(np.concatenate(wanted)) if wanted else np.empty(0, dtype=np.int64)
        images = self._images(together)
        return [
            Frames(
                images if len(wanted) == 1 else images[np.searchsorted(together, positions)],
                self.times_s[positions],
                (cut.start_s, cut.end_s),
                cut.clamped,
            )
            for cut, positions in zip(cuts, wanted, strict=True)
        ]

    def _positions_at(self, times_s: np.ndarray) -> np.ndarray:
        if np.isnan(times_s).any():
            raise TimeError("NaN is not a time")
        return np.maximum(np.searchsorted(self.times_s, times_s + SAME_TIME_S, side="right") - 1, 0)

    def _images(self, positions: np.ndarray) -> np.ndarray:
        if self._closed:
            raise ValueError(f"{self._name}: the video is closed")
        ascending, inverse = np.unique(positions, return_inverse=True)
        images = np.empty((len(ascending), *self.frame_shape), dtype=np.uint8)
        if len(ascending):
            _ask(self._name, self._timeout_s, "read", (self._index, ascending.tolist()), images)
        return images if np.array_equal(positions, ascending) else images[inverse]


def open_video(
    path_or_uri: str | os.PathLike[str], timeout_s: float = 60.0, allow_truncated: bool = False
) -> Video:
    """Open a video file, given as a path or a `file://` URI.

    `timeout_s` holds for opening and for each read. Raises VideoError:

        missing       no such file, or not a file        undecodable   not one frame can be decoded
        empty         0 bytes                            truncated     cut off; allow_truncated=True opens it
        no_video      sound or a cover picture only      timeout       no answer in `timeout_s` seconds
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; give seconds above 0")
    name = os.fsdecode(path_or_uri)
    index = _ask(name, timeout_s, "open", (file_paths(path_or_uri),))
    if index.cut and not allow_truncated:
        extent = f"cut off after {len(index.ticks)} frames ({index.duration_s:.1f} s)"
        raise VideoError("truncated", f"{name}: {extent}; allow_truncated=True opens what is there")
    return Video(index, name, timeout_s)


def file_paths(path_or_uri: str | os.PathLike[str]) -> list[str]:
    """The absolute paths that a path or `file://` URI may mean, best first.

    Raises VideoError missing for other schemes and for an empty path.
    """
    text = os.fsdecode(path_or_uri)
    scheme, separator, _ = text.partition("://")
    found = spellings(text)
    if not all(found):
        raise VideoError("missing", "no path was given")
    if separator and scheme.lower() in ("http", "https", "ftp", "rtsp", "rtmp", "s3"):
        raise VideoError("missing", f"{text}: not a file; only paths and file:// URIs are read")
    return [os.path.abspath(spelling) for spelling in found]


def spellings(path_or_uri: str) -> list[str]:
    """The paths that a path or `file://` URI may mean, best first, absolute or not.

    A plain path is taken as it is. A URI is decoded exactly once; `file://` put before a path that was never
    encoded is a common spelling too, so the text as it stands comes second.
    """
    scheme, separator, rest = path_or_uri.partition("://")
    if not separator or scheme.lower() != "file":
        return [path_or_uri]
    rest = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    return list(dict.fromkeys([os.fsdecode(unquote_to_bytes(os.fsencode(rest))), rest]))


def crop_times_s(start_s: float, end_s: float, fps: float, max_frames: int) -> np.ndarray:
    """float64 [n]: start, start + 1/fps, ... <= end; `max_frames` from start to end if those are too many."""
    count = math.floor((end_s - start_s + SAME_TIME_S) * fps) + 1
    if count > max_frames:
        return np.linspace(start_s, end_s, max_frames)
    return start_s + np.arange(count) / fps


def spread(ticks: np.ndarray, n: int) -> np.ndarray:
    """int64 [min(n, len(ticks))]: distinct positions, evenly in time from the first to the last."""
    last = len(ticks) - 1
    n = min(n, last + 1)
    if is_constant(ticks):
        return np.round(np.linspace(0, last, n)).astype(np.int64)
    even = np.linspace(0, ticks[-1] - ticks[0], n)
    shown = np.searchsorted(ticks - ticks[0], even, side="right") - 1
    order = np.arange(n)
    ascending = np.maximum.accumulate(shown - order) + order
    return np.minimum(ascending, last - (n - 1 - order))


def _ask(
    name: str, timeout_s: float, operation: str, arguments: tuple, frames: np.ndarray | None = None
) -> Any:
    """Ask the reader; its errors name the file as the caller does."""
    try:
        return worker.request(operation, arguments, timeout_s, frames)
    except VideoError as error:
        raise VideoError(error.reason, f"{name}: {error}") from error
    except worker.ReaderTimeout as error:
        words = f"{name}: the reader did not answer within {timeout_s:g} s and was ended"
        raise VideoError("timeout", words) from error
    except worker.ReaderCrash as error:
        raise VideoError("undecodable", f"{name}: the reader crashed on it ({error})") from error
    except worker.ReaderBug as error:  # odd files have no end; it fails this one, not the run
        log.warning("%s: the reader failed in a way that it should not:\n%s", name, error)
        why = str(error).strip().rpartition("\n")[2]
        raise VideoError("undecodable", f"{name}: the reader failed on it ({why})") from error
