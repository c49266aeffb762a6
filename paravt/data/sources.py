"""Real videos into whose frames the needle world is written: which are used, and what is cut from each.

    used        opens, its last frame can be read, and it lasts at least as long as the longest needle, so that
                no needle shows over the same picture twice
    left out    the rest, and files whose content is there under another name; each with its reason
    held out    a quarter of the used videos, at least one, is for evaluation; RL gets the others
    cut         a scene takes a stretch of one video. A longer video gives a stretch that starts at a drawn
                time; a shorter one is shown from its start, again and again
    picture     the middle square of a frame, shrunk or enlarged to the needle world's size

Draws are stable hashes over contents, so they do not change with the folder's path or with file names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from paravt.config import NeedlesConfig
from paravt.data.facts import examine
from paravt.data.media import sha256_of
from paravt.hashing import stable_hash
from paravt.video import open_video

SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi")
HELD_OUT_SHARE = 0.25
MOST_BYTES = 2**27  # of decoded frames that are held at a time


@dataclass(frozen=True)
class Source:
    """One video that is used. `name` is its path in the folder, `split` the table that it is for."""

    name: str
    path: Path
    sha256: str
    duration_s: float
    split: Literal["rl", "eval"]

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "sha256": self.sha256,
            "duration_s": round(self.duration_s, 6),
            "split": self.split,
        }


@dataclass(frozen=True)
class Cut:
    """The stretch of a video that a scene is written into."""

    source: Source
    start_s: float

    def pictures(self, count: int, config: NeedlesConfig, timeout_s: float) -> Iterator[np.ndarray]:
        """`count` pictures uint8 [size, size, 3] at `config.fps`. Raises VideoError."""
        with open_video(self.source.path, timeout_s=timeout_s) as video:
            times_s = (self.start_s + np.arange(count) / config.fps) % video.duration_s
            together = max(1, MOST_BYTES // int(np.prod(video.frame_shape)))
            for first in range(0, count, together):
                for frame in video.frames_at(times_s[first : first + together]):
                    yield middle_square(frame, config.size)


@dataclass(frozen=True)
class Sources:
    """The videos of a folder. `left_out` gives the reason by name."""

    used: tuple[Source, ...]
    left_out: Mapping[str, str]

    def of(self, split: str) -> list[Source]:
        return [source for source in self.used if source.split == split]

    def cut(self, seed: int, split: str, index: int, duration_s: float) -> Cut:
        """The stretch for scene (seed, split, index) of `duration_s` seconds."""
        choices = self.of(split)
        source = choices[stable_hash(seed, split, index, "source") % len(choices)]
        share = stable_hash(seed, split, index, "start") / 2**64
        return Cut(source, max(0.0, source.duration_s - duration_s) * share)

    def to_json(self) -> dict:
        return {"used": [source.to_json() for source in self.used], "left_out": dict(self.left_out)}


def find_sources(folder: Path, shortest_s: float, timeout_s: float) -> Sources | None:
    """The videos under `folder` that last `shortest_s` or longer; None if it holds none at all.

    Raises ValueError if the folder is missing, or if fewer than two of its videos can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"data.needles.source_dir {folder} is not a folder; write one that holds videos")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        return None
    found: dict[str, tuple[Path, float]] = {}
    left_out: dict[str, str] = {}
    for path in paths:
        name, sha256 = path.relative_to(folder).as_posix(), sha256_of(path)
        if sha256 in found:
            left_out[name] = f"the same content as {found[sha256][0].relative_to(folder).as_posix()}"
            continue
        facts = examine(path, timeout_s)
        if facts.duration_s is None:
            left_out[name] = str(facts.problem).partition(":")[0]
        elif facts.duration_s < shortest_s:
            left_out[name] = f"too short: {facts.duration_s:.1f} s, a needle shows for up to {shortest_s:g} s"
        else:
            found[sha256] = (path, facts.duration_s)
    if len(found) < 2:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(
            f"data.needles.source_dir {folder} holds {len(found)} usable videos, and RL and evaluation need "
            f"one each at least" + (f" ({reasons})" if reasons else "")
        )
    held_out = _held_out(list(found))
    used = [
        Source(
            path.relative_to(folder).as_posix(), path, sha256, seconds, "eval" if sha256 in held_out else "rl"
        )
        for sha256, (path, seconds) in sorted(found.items())
    ]
    return Sources(tuple(used), left_out)


def middle_square(frame: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [size, size, 3]."""
    height, width, _ = frame.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = Image.fromarray(frame[top : top + side, left : left + side])
    return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))


def _held_out(contents: Sequence[str]) -> set[str]:
    ordered = sorted(contents, key=lambda sha256: (stable_hash("held out", sha256), sha256))
    return set(ordered[: max(1, int(len(ordered) * HELD_OUT_SHARE))])
