"""Small made clips: 64 x 64, 30 frames a second, the frame's number coded in its brightness."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

FPS = 30
STEP = 6  # brightness levels between frames; numbers repeat after 40 frames


def brightness(number: int) -> int:
    return 8 + STEP * (number % 40)


def picture(number: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    return np.full((*size, 3), brightness(number), dtype=np.uint8)


def write_clip(
    path: Path,
    frames: int,
    *,
    stamps: Sequence[int] | None = None,
    key_every: int = 30,
    images: Sequence[np.ndarray] | np.ndarray | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """H.264 in mp4. `stamps` are presentation times in thousandths of a second (variable rate)."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.options = {"crf": "10", "g": str(key_every), "threads": "1", "sc_threshold": "0"}
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000) if stamps else Fraction(1, FPS)
        for number in range(frames):
            image = images[number] if images is not None else picture(number)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = stamps[number] if stamps else number
            frame.time_base = stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_tone(path: Path, cover: bool = False) -> Path:
    """A second of sound; with a cover picture if asked, which is a still and no film."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=44_100)
        art = None
        if cover:
            art = container.add_stream("mjpeg")
            art.width, art.height, art.pix_fmt = 64, 64, "yuvj420p"
            art.disposition = av.stream.Disposition.attached_pic
            frame = av.VideoFrame.from_ndarray(picture(3), format="rgb24").reformat(format="yuvj420p")
            container.mux(art.encode(frame))
        wave = np.zeros((1, 44_100), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 44_100, 0
        container.mux(sound.encode(frame))
        container.mux(sound.encode())
    return path


def write_rotated(path: Path) -> Path:
    """A clip whose left half is bright, with a display matrix that turns it by a quarter."""
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    image[:, :32] = 220
    plain = write_clip(path.with_suffix(".plain.mp4"), 12, images=[image] * 12)
    data = bytearray(plain.read_bytes())
    zero, one = bytes(4), (0x10000).to_bytes(4, "big")
    identity = one + zero * 3 + one + zero * 3 + (0x40000000).to_bytes(4, "big")
    turned = zero + one + zero + (-0x10000).to_bytes(4, "big", signed=True) + zero * 4
    turned += (0x40000000).to_bytes(4, "big")
    at = data.index(identity, data.index(b"tkhd"))  # the matrix of the track, not of the movie
    data[at : at + len(identity)] = turned
    path.write_bytes(bytes(data))
    return path


def write_truncated(path: Path, frames: int = 150, share: float = 0.6) -> Path:
    """The first `share` of a file whose index stands at its beginning."""
    rng = np.random.default_rng(0)
    whole = write_clip(
        path.with_suffix(".whole.mp4"),
        frames,
        key_every=15,
        options={"movflags": "+faststart"},
        images=rng.integers(0, 255, (frames, 64, 64, 3), dtype=np.uint8),
    )
    data = whole.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def straight_decode(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The definition: every frame in turn, upright, with its time from the first one."""
    images, times = [], []
    with av.open(str(path)) as container:
        for frame in container.decode(container.streams.video[0]):
            image = frame.to_ndarray(format="rgb24")
            images.append(np.rot90(image, round(frame.rotation / 90) % 4))
            times.append(float(frame.pts * frame.time_base))
    return np.stack(images), np.array(times) - times[0]
