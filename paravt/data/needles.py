"""The needle world: videos whose answers are known because we made them.

A video is a row of parts, each with its own background colour. In each part a white shape shows for two or
three seconds. With few overview frames the parts are visible and most shapes are not, so looking closer pays;
with many frames some questions can be answered without it. Each part shows in the overview of the smallest
frame budget, so that the window to look at can always be worked out from what is seen.

Questions: which shape shows in a part (mcq), do two parts show the same shape (mcq, two crops), when does the
shape show (tvg), name the shape (oe). Everything follows from (seed, split, index) by a stable hash.

With real videos (`paravt.data.sources`) the same scene is drawn on their frames in place of the colours: a part
is then a window of time, and a question names it so. Shapes get a dark rim, to be seen on bright pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
import hashlib
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from paravt.config import NeedlesConfig
from paravt.rollout import LETTERS, Sample

if TYPE_CHECKING:
    from paravt.data.sources import Sources

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (200, 30, 30),
    "green": (30, 150, 40),
    "blue": (30, 50, 200),
    "yellow": (210, 190, 30),
    "purple": (140, 40, 160),
    "cyan": (30, 180, 190),
}
SHAPES = ("circle", "square", "triangle", "cross")
KINDS = ("shape", "same", "when", "name")
MARGIN_S = 0.5  # a shape keeps this far from the borders of its part
RADIUS, RIM = 0.33, 1.2  # of a shape as a share of the picture; of its rim as a multiple of the shape


@dataclass(frozen=True)
class Part:
    """One background colour from `start_s` to `end_s`, with one shape showing in `needle_s`."""

    colour: str
    start_s: float
    end_s: float
    shape: str
    needle_s: tuple[float, float]
    centre: tuple[float, float]

    def shows_at(self, time_s: float) -> bool:
        return self.needle_s[0] <= time_s < self.needle_s[1]


@dataclass(frozen=True)
class Scene:
    """A whole video before it is drawn."""

    id: str
    parts: tuple[Part, ...]

    @property
    def duration_s(self) -> float:
        return self.parts[-1].end_s

    def part_at(self, time_s: float) -> Part:
        """The part on screen at `time_s`; the last one at and after the end."""
        return next((part for part in self.parts if time_s < part.end_s), self.parts[-1])

    def part_of(self, colour: str) -> Part:
        return next(part for part in self.parts if part.colour == colour)


def stable_rng(*key: object) -> np.random.Generator:
    """A generator that depends on the key alone, in every process and on every machine."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def make_scene(config: NeedlesConfig, seed: int, split: str, index: int, smallest_budget: int = 4) -> Scene:
    """The scene of (seed, split, index), drawn again until each part shows in the smallest overview."""
    rng = stable_rng(seed, split, index)
    tick = 1 / config.fps
    while True:
        lengths = np.round(rng.uniform(*config.part_s, config.parts) / tick) * tick
        borders = np.round(np.concatenate([[0.0], np.cumsum(lengths)]), 6)
        seen_s = overview_times_s(borders[-1], config.fps, smallest_budget)
        if all(
            any(start <= t < end for t in seen_s)
            for start, end in zip(borders[:-1], borders[1:], strict=True)
        ):
            break
    colours = rng.permutation(list(COLOURS))[: config.parts]
    shapes = [str(shape) for shape in rng.choice(SHAPES, config.parts)]
    if rng.random() < 0.5:  # else two parts would be equal too seldom to ask about
        first, second = rng.permutation(config.parts)[:2]
        shapes[first] = shapes[second]
    parts = []
    for colour, shape, start, end in zip(colours, shapes, borders[:-1], borders[1:], strict=True):
        length = round(float(rng.uniform(*config.needle_s)) / tick) * tick
        first = round(float(rng.uniform(start + MARGIN_S, end - MARGIN_S - length)) / tick) * tick
        needle_s = (round(first, 6), round(first + length, 6))
        centre = tuple(float(v) for v in rng.uniform(0.42, 0.58, 2))
        parts.append(Part(str(colour), float(start), float(end), shape, needle_s, centre))
    return Scene(f"{split}-{index:05d}", tuple(parts))


def overview_times_s(duration_s: float, fps: int, count: int) -> np.ndarray:
    """Times of `count` frames spread evenly from the first to the last shown frame, at a constant rate."""
    frames = round(duration_s * fps)
    return np.unique(np.round(np.linspace(0, frames - 1, min(count, frames)))) / fps


def draw(part: Part, time_s: float, size: int, picture: np.ndarray | None = None) -> np.ndarray:
    """One frame uint8 [size, size, 3]: the background and, while it shows, the white shape.

    The background is the part's colour, or `picture` uint8 [size, size, 3]; there the shape has a black rim.
    """
    frame = np.empty((size, size, 3), dtype=np.uint8)
    frame[:] = COLOURS[part.colour] if picture is None else picture
    if part.shows_at(time_s):
        y, x = np.mgrid[:size, :size] + 0.5
        dy, dx = y / size - part.centre[1], x / size - part.centre[0]
        if picture is not None:
            frame[_inside(part.shape, dx, dy, RADIUS * RIM)] = 0
        frame[_inside(part.shape, dx, dy, RADIUS)] = 255
    return frame


def _inside(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    match shape:
        case "circle":
            return dx**2 + dy**2 < radius**2
        case "square":
            return np.maximum(abs(dx), abs(dy)) < radius * 0.9
        case "triangle":
            return (dy < radius * 0.9) & (dy > -radius) & (abs(dx) < (dy + radius) * 0.55)
        case "cross":
            return (np.minimum(abs(dx), abs(dy)) < radius * 0.3) & (np.maximum(abs(dx), abs(dy)) < radius)
    raise ValueError(f"no shape is called {shape!r}")


def frame_count(scene: Scene, config: NeedlesConfig) -> int:
    return round(scene.duration_s * config.fps)


def write_video(
    scene: Scene, path: Path, config: NeedlesConfig, pictures: Iterable[np.ndarray] | None = None
) -> None:
    """Render the scene as H.264 in mp4, one key frame a second; equal scenes give equal bytes.

    It is drawn on the parts' colours, or on `pictures`, one uint8 [size, size, 3] a frame.

    x264 is asked for one thread and no macroblock tree: on frames as small as these the tree makes the same
    input come out differently now and then.
    """
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=config.fps)
        stream.width = stream.height = config.size
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, config.fps)
        stream.options = {
            "crf": "18",
            "preset": "veryfast",
            "g": str(config.fps),
            "threads": "1",
            "x264-params": "mbtree=0",
        }
        for index, picture in zip(range(frame_count(scene, config)), pictures or repeat(None)):
            time_s = index / config.fps
            image = draw(scene.part_at(time_s), time_s, config.size, picture)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def make_question(
    scene: Scene, video: str, kind: str, index: int, rng: np.random.Generator, by_time: bool = False
) -> Sample:
    """One question of `kind` about the scene. `meta` names what is asked: parts by their colour, or, with
    `by_time`, by their window.
    """
    colours = [str(c) for c in rng.permutation([part.colour for part in scene.parts])]
    asked = colours[:2] if kind == "same" else colours[:1]
    part = scene.part_of(asked[0])
    names = [_by_time(scene.part_of(colour)) if by_time else f"{colour} part" for colour in asked]
    options: tuple[str, ...] = ()
    answer: str | tuple[float, float]
    match kind:
        case "shape":
            question = f"Which shape shows in the {names[0]}?"
            options = tuple(str(s) for s in rng.permutation(SHAPES))
            answer = LETTERS[options.index(part.shape)]
        case "same":
            question = f"Do the {names[0]} and the {names[1]} show the same shape?"
            options = tuple(str(s) for s in rng.permutation(["same", "different"]))
            equal = part.shape == scene.part_of(asked[1]).shape
            answer = LETTERS[options.index("same" if equal else "different")]
        case "when":
            question, answer = f"When does the shape show in the {names[0]}?", part.needle_s
        case "name":
            question, answer = f"Name the shape in the {names[0]}.", part.shape
        case _:
            raise ValueError(f"no kind of question is called {kind!r}; use one of {', '.join(KINDS)}")
    return Sample(
        id=f"{scene.id}-{index}-{kind}",
        video=video,
        question=question,
        answer=answer,
        question_type={"when": "tvg", "name": "oe"}.get(kind, "mcq"),
        options=options,
        meta={"kind": kind, "asked": names if by_time else asked, "duration_s": scene.duration_s},
    )


def _by_time(part: Part) -> str:
    return f"part from {part.start_s:.1f} to {part.end_s:.1f} seconds"


def make_split(
    config: NeedlesConfig,
    seed: int,
    split: str,
    count: int,
    folder: Path,
    video_prefix: str,
    sources: Sources | None = None,
    timeout_s: float = 60.0,
) -> tuple[list[Sample], dict[str, Scene]]:
    """Render the videos of a split into `folder` and ask `count` questions about them, kinds in turn.

    A question's `video` is `video_prefix` plus the file name. Scenes are returned by video path. With
    `sources` scenes are drawn on frames of real videos, questions name windows, and `meta` says which
    footage it is; raises VideoError if that cannot be read in `timeout_s` seconds.
    """
    samples: list[Sample] = []
    scenes: dict[str, Scene] = {}
    index = 0
    while len(samples) < count:
        scene = make_scene(config, seed, split, index)
        name = f"{scene.id}.mp4"
        pictures, footage = None, {}
        if sources:
            cut = sources.cut(seed, split, index, scene.duration_s)
            pictures = cut.pictures(frame_count(scene, config), config, timeout_s)
            footage = {"source": cut.source.sha256, "source_start_s": round(cut.start_s, 3)}
        write_video(scene, folder / name, config, pictures)
        video = f"{video_prefix}{name}"
        scenes[video] = scene
        rng = stable_rng(seed, split, index, "questions")
        for number in range(min(config.questions_per_video, count - len(samples))):
            kind = KINDS[(index * config.questions_per_video + number) % len(KINDS)]
            sample = make_question(scene, video, kind, number, rng, by_time=sources is not None)
            samples.append(replace(sample, meta=sample.meta | footage))
        index += 1
    return samples, scenes
