"""Frames by their position in the index, in one ascending pass, upright RGB.

Two backends read. decord is about twice as fast on ordinary clips, but it is right only where each key frame
is an H.264 IDR, the rate is constant and packets and shown frames agree (`Index.decord`); there its pixels
are those of PyAV, bit for bit. Everything else, and frames so small that decord's seeks cost more than the
decoding, is read by PyAV. Both convert colours alike (PyAV's `to_ndarray(format="rgb24")`), so a frame
depends on the file and its position alone.

This module runs inside the reader process (`paravt.reading.worker`): it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import os

from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
import numpy as np

from paravt.reading.container import VideoError, open_container, stamp_of, words
from paravt.reading.indexing import Index

DECORD_CHUNK = 8
THREADED_PIXELS = 500_000  # threads pay from about 960x540 on


def read(index: Index, positions: Sequence[int], send: Callable[[np.ndarray], None]) -> None:
    """Send the frame at each of `positions` (ascending, distinct), uint8 [height, width, 3].

    Raises VideoError if the file is no longer the one that was indexed, or can no longer be decoded.
    """
    if stamp_of(index.path) != index.stamp:
        raise VideoError("undecodable", "the file was changed after it had been opened")
    left = list(positions)
    if index.decord:
        left = left[_read_decord(index, left, send) :]
    if left:
        for image in _read_pyav(index, left):
            send(image)


def _read_decord(index: Index, positions: list[int], send: Callable[[np.ndarray], None]) -> int:
    """Read as many of `positions` as decord can; returns how many were sent."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    sent = 0
    try:
        reader = decord.VideoReader(index.path, num_threads=_threads(index))
        if len(reader) != len(index.ticks):
            return 0
        for start in range(0, len(positions), DECORD_CHUNK):
            images = reader.get_batch(positions[start : start + DECORD_CHUNK]).asnumpy()
            if images.shape[1:] != index.frame_shape:
                return sent
            for image in images:
                send(image)
                sent += 1
    except (decord.DECORDError, IndexError):
        return sent  # PyAV reads the rest
    return sent


def _read_pyav(index: Index, positions: Sequence[int]) -> Iterator[np.ndarray]:
    try:
        with open_container(index.path) as container:
            stream = container.streams[index.stream]
            threads = 1 if index.ordinals is not None or index.cut else _threads(index)
            stream.codec_context.thread_count = threads
            if threads > 1:
                stream.thread_type = "AUTO"
            pick = _by_time if index.ordinals is None else _by_ordinal
            for frame in pick(container, stream, index, positions):
                yield _upright(frame, index)
    except FFmpegError as error:
        raise VideoError("undecodable", words(error)) from error


def _by_time(
    container: InputContainer, stream: VideoStream, index: Index, positions: Sequence[int]
) -> Iterator[VideoFrame]:
    """Frames by their timestamp, decoding on where the next one is near and seeking where it is not."""
    frames = _decode_from(container, stream, None)
    frame: VideoFrame | None = None
    for position in positions:
        target = int(index.ticks[position])
        key = int(np.searchsorted(index.keys[:, 0], target, side="right")) - 1
        if key >= 0 and _is_ahead(index, key, frame):
            frames, frame = _decode_from(container, stream, int(index.keys[key, 1])), None
        frame = _advance(frames, frame, target)
        if frame is None or frame.pts != target:
            # A seek may land late, or on a key frame that is not one after all: start one earlier.
            earlier = int(index.keys[key - 1, 1]) if key > 0 else None
            frames = _decode_from(container, stream, earlier, rewind=True)
            frame = _advance(frames, None, target)
        if frame is None or frame.pts != target:  # of a long file, packets in its middle had been believed
            raise VideoError("undecodable", f"the frame at {index.times_s[position]:.3f} s does not decode")
        yield frame


def _is_ahead(index: Index, key: int, frame: VideoFrame | None) -> bool:
    """Whether the key frame lies so far after the last decoded frame that a seek saves decoding."""
    reached = int(index.ticks[0]) if frame is None else frame.pts
    between = np.searchsorted(index.ticks, [reached, index.keys[key, 0]])
    return int(between[1] - between[0]) > 2


def _advance(frames: Iterator[VideoFrame], frame: VideoFrame | None, target: int) -> VideoFrame | None:
    """Decode up to the frame of `target`: it, or the first one past it; None if there is neither."""
    while frame is None or frame.pts is None or frame.pts < target:
        frame = next(frames, None)
        if frame is None:
            break
    return frame


def _by_ordinal(
    container: InputContainer, stream: VideoStream, index: Index, positions: Sequence[int]
) -> Iterator[VideoFrame]:
    """Frames by their place in a straight decode from the start."""
    wanted = iter(index.ordinals[list(positions)].tolist())
    next_wanted = next(wanted)
    for ordinal, frame in enumerate(_decode_from(container, stream, None)):
        if ordinal == next_wanted:
            yield frame
            next_wanted = next(wanted, None)
            if next_wanted is None:
                return
    raise VideoError("undecodable", "the file gives fewer frames than when it was opened")


def _decode_from(
    container: InputContainer, stream: VideoStream, seek: int | None, rewind: bool = False
) -> Iterator[VideoFrame]:
    """Frames from a seek timestamp on (None: from the start), up to where a straight decode stops."""
    if seek is not None:
        container.seek(seek, stream=stream)
    elif rewind:
        container.seek(0)
    begun = False
    try:
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except FFmpegError:
                if begun and packet.is_corrupt:
                    return
                continue
            begun = begun or bool(frames)
            yield from frames
    except FFmpegError:
        return


def _upright(frame: VideoFrame, index: Index) -> np.ndarray:
    width, height = index.stored_size
    if (frame.width, frame.height) != (width, height):  # the size changes inside the stream
        frame = frame.reformat(width=width, height=height, format="rgb24")
    image = frame.to_ndarray(format="rgb24")
    a, b, c, d = index.turn
    rows, columns = (d, a) if a else (b, c)
    image = image if a else image.transpose(1, 0, 2)
    return np.ascontiguousarray(image[::rows, ::columns])


def _threads(index: Index) -> int:
    width, height = index.stored_size
    return min(4, os.cpu_count() or 1) if width * height >= THREADED_PIXELS else 1
