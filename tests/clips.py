"""Made clips with known answers, and the straight PyAV decode that defines what is right.

A frame shows its own number: four grey quadrants, each one octal digit of it (0-4095), which survives H.264.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
import shutil

import av
import numpy as np

ODD_NAME = "mon été 视频 1 %20#x.mp4"


def picture(number: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """uint8 [height, width, 3] with the number in it; `size` is (width, height)."""
    width, height = size
    image = np.empty((height, width, 3), dtype=np.uint8)
    for place in range(4):
        rows = slice(height // 2) if place < 2 else slice(height // 2, None)
        columns = slice(width // 2) if place % 2 == 0 else slice(width // 2, None)
        image[rows, columns] = 32 * (number >> 3 * place & 7) + 16
    return image


def number_in(image: np.ndarray) -> int:
    """The number that `picture` put into an upright frame."""
    height, width, _ = image.shape
    number = 0
    for place in range(4):
        row, column = (1 + 2 * (place // 2)) * height // 4, (1 + 2 * (place % 2)) * width // 4
        value = image[row - 4 : row + 4, column - 4 : column + 4].mean()
        number |= min(7, max(0, round((value - 16) / 32))) << 3 * place
    return number


def numbers_in(images: np.ndarray) -> list[int]:
    return [number_in(image) for image in images]


def write_clip(
    path: Path,
    count: int = 60,
    fps: int | Fraction = 30,
    size: tuple[int, int] = (64, 64),
    times_ms: Sequence[int] | None = None,
    rotation: int = 0,
    draw: Callable[[int], np.ndarray] | None = None,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Path:
    """Write `count` frames at a constant rate, or one at each of `times_ms` (then `count` is ignored)."""
    count = count if times_ms is None else len(times_ms)
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.options = {"preset": "veryfast", "threads": "1"} | (options or {}) if "264" in codec else {}
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(count):
            image = draw(number) if draw else picture(number, size)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = number if times_ms is None else times_ms[number]
            frame.time_base = 1 / Fraction(fps) if times_ms is None else Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_tone(path: Path, seconds: float = 1.0, cover: bool = False) -> Path:
    """Sound only, or sound with a cover picture."""
    rate = 48_000
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        picture_stream = None
        if cover:
            picture_stream = container.add_stream("mjpeg", rate=1)
            picture_stream.width, picture_stream.height, picture_stream.pix_fmt = 64, 64, "yuvj420p"
            picture_stream.disposition = av.stream.Disposition.attached_pic
        samples = np.sin(np.arange(int(rate * seconds)) * 440 * 2 * np.pi / rate).astype(np.float32)
        if picture_stream is not None:
            still = av.VideoFrame.from_ndarray(picture(0), format="rgb24")
            still.pts = 0
            container.mux(picture_stream.encode(still))
            container.mux(picture_stream.encode())
        for start in range(0, len(samples), 1024):
            block = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], "fltp", "mono")
            block.sample_rate, block.pts = rate, start
            container.mux(stream.encode(block))
        container.mux(stream.encode())
    return path


def write_truncated(path: Path, count: int = 300, share: float = 0.6, **details) -> Path:
    """The first `share` of the bytes of a clip whose header stands in front."""
    whole = path.with_name(f"whole-{path.name}")
    write_clip(whole, count, container_options={"movflags": "faststart"}, **details)
    data = whole.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    whole.unlink()
    return path


def write_named(folder: Path, source: Path, name: str = ODD_NAME) -> Path:
    """A copy of `source` under an odd name."""
    return Path(shutil.copyfile(source, folder / name))


def straight(path: Path | str) -> tuple[list[np.ndarray], np.ndarray]:
    """The definition: decode from the start until PyAV stops. Upright frames and their times."""
    images: list[np.ndarray] = []
    times: list[Fraction] = []
    with av.open(str(path)) as container:
        try:
            for frame in container.decode(video=0):
                images.append(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))
                times.append(frame.pts * frame.time_base)
        except av.error.FFmpegError:
            pass
    return images, np.array([float(time - times[0]) for time in times])
