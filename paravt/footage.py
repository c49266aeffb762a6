"""The videos of one `run_episodes` call: opened once, read once for all episodes that ask for the same.

    overview   key (path, K)                             first round, all files at the same time
    crop       key (path, start, end, most frames)       all windows of a round in one ascending pass a file

A key holds everything that shapes its value; rate and time limit are those of the one VisualConfig. A file
that cannot be read gives its VideoError in the place of frames, and the reading of other files goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
import time
from typing import NamedTuple, TypeVar

from paravt.config import VisualConfig
from paravt.data.media import on_this_machine
from paravt.video import Frames, Video, VideoError, open_video

Key = TypeVar("Key")
Value = TypeVar("Value")
Read = tuple[Frames | VideoError, float]  # what came, and the seconds it took


class BudgetError(RuntimeError):
    """The decoder gave another number of frames than the budget asks for."""


class CropKey(NamedTuple):
    path: str
    start_s: float
    end_s: float
    max_frames: int
    fps: float = 0.0
    """0: the rate of the configuration; a call may ask for another."""

    @property
    def window_s(self) -> tuple[float, float]:
        return self.start_s, self.end_s


def locate(video: str, root: str | Path) -> str:
    """The path or URI to open: relative paths start at `root`, published media in the media root."""
    return video if "://" in video else str(Path(root) / on_this_machine(video))


class Footage:
    """Context manager over open videos. `readers` files are decoded at the same time."""

    def __init__(self, visual: VisualConfig, readers: int = 4) -> None:
        self.visual = visual
        self._pool = ThreadPoolExecutor(max_workers=max(1, readers), thread_name_prefix="paravt-read")
        self._open: dict[str, tuple[Video, ExitStack]] = {}
        self._overviews: dict[tuple[str, int], Read] = {}
        self._crops: dict[CropKey, Read] = {}

    def __enter__(self) -> Footage:
        return self

    def __exit__(self, *exception) -> None:
        self.close_except(set())
        self._pool.shutdown()

    def overviews(self, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Read]:
        """Evenly spaced frames for each (path, K), with the seconds that its file took.

        Raises BudgetError if a file gives neither K frames nor all that it has.
        """
        self._fill(self._overviews, wanted, self._read_overviews)
        return self._overviews

    def crops(self, wanted: Iterable[CropKey]) -> dict[CropKey, Read]:
        """Frames of each window."""
        self._fill(self._crops, wanted, self._read_crops)
        return self._crops

    def duration_s(self, path: str) -> float:
        return self._open[path][0].duration_s

    def close_except(self, paths: set[str]) -> None:
        """Close the files that no live episode needs."""
        for path in self._open.keys() - paths:
            self._open.pop(path)[1].close()

    def _fill(
        self,
        known: dict[Key, Read],
        wanted: Iterable[Key],
        read: Callable[[str, list[Key]], dict[Key, Frames]],
    ) -> None:
        by_path: dict[str, list[Key]] = defaultdict(list)
        for key in sorted(set(wanted) - known.keys()):
            by_path[key[0]].append(key)

        def job(path: str) -> dict[Key, Read]:
            started = time.perf_counter()
            try:
                found = read(path, by_path[path])
            except VideoError as error:
                found = dict.fromkeys(by_path[path], error)
            seconds = time.perf_counter() - started
            return {key: (value, seconds) for key, value in found.items()}

        for found in self._pool.map(job, by_path):
            known.update(found)

    def _video(self, path: str) -> Video:
        if path not in self._open:
            with ExitStack() as stack:
                video = stack.enter_context(open_video(path, timeout_s=self.visual.read_timeout_s))
                self._open[path] = (video, stack.pop_all())
        return self._open[path][0]

    def _read_overviews(self, path: str, keys: list[tuple[str, int]]) -> dict[tuple[str, int], Frames]:
        video = self._video(path)
        found = {}
        for key in keys:
            found[key] = video.sample(key[1])
            _check_budget(video, found[key], key)
        return found

    def _read_crops(self, path: str, keys: list[CropKey]) -> dict[CropKey, Frames]:
        crops = self._video(path).crops(
            [key.window_s for key in keys],
            [key.fps or self.visual.crop_fps for key in keys],
            [key.max_frames for key in keys],
        )
        return dict(zip(keys, crops, strict=True))


def _check_budget(video: Video, frames: Frames, key: tuple[str, int]) -> None:
    path, budget = key
    count, wanted = len(frames.images), min(budget, video.frame_count)
    if count != wanted:
        raise BudgetError(f"{path}: {count} overview frames were decoded, the budget asks for {wanted}")
