"""The process that touches video files: it can be ended when a file makes a decoder hang.

    parent                                  worker (`main` below)
    (path, request, arguments)   ------>    index | frames
    (True, value)                <------    or (False, (reason, words))

The index lists the frames that are really shown, by presentation time. It comes from the packets, which costs
no decoding; where the container contradicts itself (other counts than declared, missing or repeated time
stamps, read errors, a last frame that does not decode) each frame is decoded once to find the truth.

Frames are read by decord where it is right: constant rate, ascending frames. All else goes through PyAV,
whose straight decode defines what is right. Both give the same pixels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
import os
from pathlib import Path

import av
import decord
import numpy as np

from paravt.video import Index, VideoError

OPEN_FILES = 4  # readers kept open; a turn's crops follow its overview
RATE_SLACK = 0.01  # of a frame's length: more spread than this is a variable rate


@dataclass
class _Open:
    index: Index
    reader: decord.VideoReader | None = None


class Files:
    """Indexes and readers of the files asked for last."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple, _Open] = OrderedDict()

    def index(self, path: str) -> Index:
        return self._get(path).index

    def frames(self, path: str, positions: list[int]) -> np.ndarray:
        """uint8 [n, H, W, 3], upright, for ascending `positions` in the index."""
        file = self._get(path)
        if not file.index.constant_rate or file.index.rotation or not file.index.keys:
            return _frames_by_pyav(path, file.index, positions)
        try:
            if file.reader is None:
                file.reader = decord.VideoReader(path, num_threads=1)
            if len(file.reader) == len(file.index.pts):
                return file.reader.get_batch(positions).asnumpy()
        except decord.DECORDError:
            pass  # PyAV decides what can be read
        return _frames_by_pyav(path, file.index, positions)

    def _get(self, path: str) -> _Open:
        if not Path(path).is_file():
            raise VideoError("missing", "there is no such file")
        stat = os.stat(path)
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self._open:
            self._open[key] = _Open(make_index(path))
            while len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]


def make_index(path: str) -> Index:
    """The index of a file. Raises VideoError; its message is completed with the path by the parent."""
    if Path(path).stat().st_size == 0:
        raise VideoError("empty", "the file has no bytes")
    try:
        with av.open(path) as container:
            stream = _video_stream(container)
            index = _index_by_packets(container, stream)
            last = index and _last_frame(container, stream, index)
            if last is not None:
                return index._replace(rotation=last.rotation % 360)
        with av.open(path) as container:
            return _index_by_decoding(container, _video_stream(container))
    except av.error.FFmpegError as error:
        raise VideoError("undecodable", str(error)) from error


def _video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """The first stream that is a film; a cover picture is not one."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            stream.thread_type = "NONE"
            return stream
    raise VideoError("no_video", "it has no video stream")


def _index_by_packets(container: av.container.InputContainer, stream: av.VideoStream) -> Index | None:
    """The index from time stamps alone; None if the container contradicts itself."""
    stamps, ends, keys = [], [], []
    for packet in container.demux(stream):
        if packet.size == 0:
            continue  # the flush packet
        if packet.pts is None or packet.is_corrupt or packet.is_discard:
            return None
        stamps.append(packet.pts)
        ends.append(packet.pts + (packet.duration or 0))
        if packet.is_keyframe:
            keys.append(packet.pts)
    if not stamps or len(set(stamps)) != len(stamps):
        return None
    if not keys or (stream.frames and stream.frames != len(stamps)):
        return None
    return _index(np.sort(np.array(stamps, dtype=np.int64)), max(ends), stream, keys=tuple(sorted(keys)))


def _index(
    pts: np.ndarray,
    end: int,
    stream: av.VideoStream,
    rotation: int = 0,
    truncated: bool = False,
    keys: tuple[int, ...] = (),
) -> Index:
    steps = np.diff(pts)
    step = float(steps.mean()) if len(steps) else 0.0
    constant = len(steps) > 0 and bool(np.abs(steps - step).max() <= max(1.0, RATE_SLACK * step))
    if end <= pts[-1]:  # no duration is declared: the last frame lasts as long as the others
        fallback = 1 / float(stream.average_rate or 25) / float(stream.time_base)
        end = int(pts[-1] + round(step or fallback))
    return Index(pts, float(stream.time_base), int(end), constant, rotation, truncated, keys)


def _last_frame(
    container: av.container.InputContainer, stream: av.VideoStream, index: Index
) -> av.VideoFrame | None:
    """The last frame, decoded from the last key frame; None if the end of the index is not really shown."""
    container.seek(index.keys[-1], stream=stream)
    last = None
    for frame in container.decode(stream):
        last = frame
    return last if last is not None and last.pts == index.pts[-1] else None


def _index_by_decoding(container: av.container.InputContainer, stream: av.VideoStream) -> Index:
    """The frames that a straight decode shows, as far as it goes."""
    stamps: list[int] = []
    end, rotation, broken = 0, 0, False
    try:
        for frame in container.decode(stream):
            if frame.pts is None or (stamps and frame.pts <= stamps[-1]):
                continue  # a frame without a time of its own cannot be asked for
            stamps.append(frame.pts)
            end, rotation = frame.pts + (frame.duration or 0), frame.rotation
    except av.error.FFmpegError:
        broken = True
    if not stamps:
        raise VideoError("undecodable", "no frame of it can be decoded")
    truncated = broken or bool(stream.frames and len(stamps) < stream.frames)
    return _index(np.array(stamps, dtype=np.int64), end, stream, rotation % 360, truncated)


def _frames_by_pyav(path: str, index: Index, positions: list[int]) -> np.ndarray:
    """Frames by exact time stamp; if seeking misses one, a decode from the start decides."""
    wanted = [int(index.pts[position]) for position in positions]
    found = _decode(path, wanted, index.keys)
    if index.keys and len(found) < len(set(wanted)):
        found = _decode(path, wanted, ())
    missing = [stamp for stamp in wanted if stamp not in found]
    if missing:
        raise VideoError("undecodable", f"the frame at {missing[0] * index.time_base:.3f} s does not decode")
    return np.stack([found[stamp] for stamp in wanted])


def _decode(path: str, wanted: list[int], keys: tuple[int, ...]) -> dict[int, np.ndarray]:
    """One ascending pass over the file; it jumps only where a key frame lies ahead of the decoder."""
    found: dict[int, np.ndarray] = {}
    with av.open(path) as container:
        stream = _video_stream(container)
        frames, at = None, None
        for stamp in wanted:
            if stamp in found:
                continue
            number = bisect_right(keys, stamp)
            key = keys[number - 1] if number else None
            if frames is None or (key is not None and at < key):
                if key is not None:
                    container.seek(key, stream=stream)
                frames = container.decode(stream)
            try:
                for frame in frames:
                    if frame.pts is None:
                        continue
                    at = frame.pts
                    if at == stamp:
                        found[stamp] = _upright(frame)
                    if at >= stamp:
                        break
            except av.error.FFmpegError:
                break
    return found


def _upright(frame: av.VideoFrame) -> np.ndarray:
    image = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(image, turns)) if turns else image


def main() -> None:
    """Answer requests on standard input until it closes."""
    from multiprocessing.connection import Connection

    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a decoder prints must not mix with answers
    av.logging.set_level(av.logging.PANIC)
    decord.logging.set_level(decord.logging.QUIET)
    files = Files()
    while True:
        try:
            path, request, arguments = requests.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answers.send((True, getattr(files, request)(path, *arguments)))
        except VideoError as error:
            answers.send((False, (error.reason, str(error))))
        except Exception as error:  # the worker boundary: any decoder fault belongs to its file
            answers.send((False, ("undecodable", f"{type(error).__name__}: {error}")))

