"""What a file shows and when: the packet index is the truth, a straight PyAV decode is the definition.

    index   one demux pass: the presentation time of each frame that is really shown, ascending.
            Declared counts and rates are never believed. Short clips are decoded whole while they are
            indexed; of long ones the beginning and the end are, since that is where containers lie.
    read    frames by their position in the index, in one ascending pass, upright RGB

Two backends read. decord is about twice as fast on ordinary clips, but it is right only where key frames
are closed (each one an H.264 IDR), the rate is constant and packets and shown frames agree; there its pixels
are those of PyAV, bit for bit. Everything else, and frames so small that decord's seeks cost more than the
decoding, is read by PyAV. Both convert colours in the same way (swscale, YUV to RGB24 as PyAV's
`to_ndarray(format="rgb24")` does), so a frame depends on the file and its position alone.

This module runs inside the reader process (`paravt.reader`): it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
import os
import stat
from typing import Literal

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
import numpy as np

Reason = Literal["missing", "empty", "no_video", "undecodable", "truncated", "timeout"]
Stamp = tuple[int, int, int]

VERIFY_PIXELS = 60_000_000  # decoded at most while indexing: about a quarter of a second
TAIL_PIXELS = 600_000_000  # a last group of pictures longer than this is believed without decoding
DECORD_PIXELS = 40_000  # a frame smaller than this decodes faster than decord seeks
DECORD_FILE_BYTES = 64 * 2**20  # decord demuxes the whole file each time it opens it
DECORD_CHUNK = 8
THREADED_PIXELS = 500_000  # threads pay from about 960x540 on
NAL_TYPE, NAL_IDR, NAL_SEI, SEI_RECOVERY = 0x1F, 5, 6, 6
IDENTITY = (1, 0, 0, 1)


class VideoError(Exception):
    """A video that cannot be read. `reason` is one of `Reason`; the text is one sentence with the path."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, eq=False)
class Index:
    """The shown frames of one file, in order of time.

    `ticks` int64 [n] are presentation timestamps in units of `time_base` seconds, `end_tick` is the end of
    the last frame. `keys` int64 [k, 2] are (presentation, seek) timestamps of key frames after which decoding
    is exact. `ordinals` is set where timestamps cannot name frames: the place of each in a straight decode.
    `turn` = (a, b, c, d) of the display matrix, signs only.
    """

    path: str
    stamp: Stamp
    stream: int
    stored_size: tuple[int, int]
    turn: tuple[int, int, int, int]
    time_base: Fraction
    ticks: np.ndarray
    end_tick: int
    keys: np.ndarray
    ordinals: np.ndarray | None
    decord: bool
    cut: bool

    @cached_property
    def times_s(self) -> np.ndarray:
        """float64 [n], seconds; the first is 0."""
        return (self.ticks - self.ticks[0]) * self.time_base.numerator / self.time_base.denominator

    @property
    def duration_s(self) -> float:
        return int(self.end_tick - self.ticks[0]) * self.time_base.numerator / self.time_base.denominator

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """[height, width, 3] of an upright frame."""
        width, height = self.stored_size
        return (width, height, 3) if self.turn[0] == 0 else (height, width, 3)


@dataclass
class _Scan:
    """What one pass over the packets found."""

    packets: list[tuple[int | None, int | None, int, bool]]  # pts, duration, seek timestamp, exact key
    shown: list[tuple[int | None, int]]  # pts, duration of each decoded frame, in the order of a player
    first: VideoFrame | None = None
    whole: bool = True  # decoded to the end
    cut: bool = False
    corrupt: bool = False
    plain: bool = True  # each packet is shown, each key frame is an IDR, one size throughout
    problem: str = ""


def stamp_of(path: str) -> Stamp:
    """What tells one state of a file from another. Raises VideoError missing or empty."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise VideoError("missing", f"{path}: no such file ({_words(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise VideoError("missing", f"{path}: not a file")
    if found.st_size == 0:
        raise VideoError("empty", f"{path}: the file is empty (0 bytes)")
    return found.st_size, found.st_mtime_ns, found.st_ino


def build_index(path: str) -> Index:
    """Index one file. Raises VideoError missing, empty, no_video or undecodable.

    A file that is cut off is indexed up to its last good frame, with `cut` set.
    """
    stamp = stamp_of(path)
    with _opened(path) as container:
        stream = _video_stream(container, path)
        scan = _scan(container, stream)
        if scan.first is None:
            why = scan.problem or "it holds no frame"
            raise VideoError("undecodable", f"{path}: no frame of its video can be decoded ({why})")
        if not scan.whole:
            _check_tail(container, stream, scan)
        scan.cut = scan.cut or _ends_early(container, stream, scan, stamp[0])
        return _make_index(path, stamp, container, stream, scan)


def _make_index(
    path: str, stamp: Stamp, container: InputContainer, stream: VideoStream, scan: _Scan
) -> Index:
    time_base = Fraction(stream.time_base or scan.first.time_base)
    step = _frame_ticks(stream, scan, time_base)
    ticks, ordinals = _timeline(scan.shown, step)
    if scan.corrupt and scan.whole and ordinals is None:
        ordinals = np.arange(len(ticks))  # damaged pictures depend on where decoding began
    last_duration = scan.shown[-1][1] or (int(ticks[-1] - ticks[-2]) if len(ticks) > 1 else step)
    keys = sorted((pts, seek) for pts, _, seek, exact in scan.packets if exact and pts is not None)
    turn = _turn_of(scan.first)
    counted = sum(pts is not None for pts, *_ in scan.packets)
    agrees = scan.plain and ordinals is None and not scan.cut and counted == len(scan.shown)
    return Index(
        path=path,
        stamp=stamp,
        stream=stream.index,
        stored_size=(scan.first.width, scan.first.height),
        turn=turn,
        time_base=time_base,
        ticks=ticks,
        end_tick=int(ticks[-1]) + max(last_duration, 1),
        keys=np.array(keys, dtype=np.int64).reshape(-1, 2),
        ordinals=ordinals,
        decord=agrees
        and turn == IDENTITY
        and is_constant(ticks)
        and scan.first.width * scan.first.height >= DECORD_PIXELS
        and stamp[0] <= DECORD_FILE_BYTES
        and stream.codec_context.name == "h264"
        and scan.first.format.name in ("yuv420p", "yuvj420p")
        and container.format.name.startswith(("mov", "matroska"))
        and len(container.streams.video) == 1,
        cut=scan.cut,
    )


def is_constant(ticks: np.ndarray) -> bool:
    """Whether frames are equally long, up to the rounding of one tick."""
    even = np.linspace(ticks[0], ticks[-1], len(ticks))
    return bool(np.all(np.abs(ticks - even) <= 1))


def read(index: Index, positions: Sequence[int], send: Callable[[np.ndarray], None]) -> None:
    """Send the frame at each of `positions` (ascending, distinct), uint8 [height, width, 3].

    Raises VideoError if the file is no longer the one that was indexed, or can no longer be decoded.
    """
    if stamp_of(index.path) != index.stamp:
        raise VideoError("undecodable", f"{index.path}: the file was changed after it had been opened")
    left = list(positions)
    if index.decord:
        left = left[_read_decord(index, left, send) :]
    if left:
        for image in _read_pyav(index, left):
            send(image)


# Indexing


def _scan(container: InputContainer, stream: VideoStream) -> _Scan:
    """One demux pass, decoding until the budget is spent."""
    scan = _Scan([], [])
    budget = VERIFY_PIXELS
    entry_of = _entry_test(stream)
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                entry = entry_of(packet) if packet.is_keyframe else "none"
                scan.plain &= entry == "idr" or not packet.is_keyframe and bool(scan.packets)
                seek = packet.dts if packet.dts is not None else packet.pts
                scan.packets.append((packet.pts, packet.duration, seek or 0, entry != "none"))
            scan.plain &= not packet.is_discard
            if scan.whole and not _decode_into(scan, packet):
                break
            size = stream.codec_context
            budget -= size.width * size.height if packet.size else 0
            scan.whole &= budget > 0
    except FFmpegError as error:
        scan.cut, scan.problem = True, _words(error)
    return scan


def _decode_into(scan: _Scan, packet: av.Packet) -> bool:
    """Decode one packet; False if the decoder stopped there, as a straight decode would.

    Errors before the first frame are those of a stream that was joined late: they are passed over.
    """
    try:
        frames = packet.decode()
    except FFmpegError as error:
        scan.problem = _words(error)
        scan.cut = bool(scan.shown)
        return not scan.cut
    for frame in frames:
        scan.first = scan.first or frame
        scan.corrupt |= frame.is_corrupt
        scan.plain &= (frame.width, frame.height) == (scan.first.width, scan.first.height)
        scan.shown.append((frame.pts, frame.duration or 0))
    return True


def _check_tail(container: InputContainer, stream: VideoStream, scan: _Scan) -> None:
    """Complete a list of shown frames that was decoded at its beginning only.

    The last group of pictures is decoded too; in between, each packet that has a time is believed.
    """
    head = scan.shown
    timed = sorted((pts, duration or 0) for pts, duration, *_ in scan.packets if pts is not None)
    if len(timed) != len({pts for pts, _ in timed}) or len(timed) < len(scan.packets):
        _decode_all(container, stream, scan)  # times do not name the frames: only decoding tells
        return
    last_head = head[-1][0]
    key, seek = max(((pts, seek) for pts, _, seek, exact in scan.packets if exact), default=(0, 0))
    after = [entry for entry in timed if entry[0] > last_head]
    tail = [entry for entry in after if entry[0] >= key]
    pixels = stream.codec_context.width * stream.codec_context.height
    if key <= last_head or len(tail) * pixels > TAIL_PIXELS:
        scan.shown = head + after
        return
    check = _Scan([], [])
    try:
        container.seek(seek, stream=stream)
        for packet in container.demux(stream):
            if not _decode_into(check, packet):
                break
    except FFmpegError:
        check.cut = True
    seen = [entry for entry in check.shown if entry[0] is not None and entry[0] >= key]
    scan.cut |= check.cut
    scan.shown = head + [entry for entry in after if entry[0] < key] + (seen or tail)


def _decode_all(container: InputContainer, stream: VideoStream, scan: _Scan) -> None:
    scan.shown, scan.first, scan.cut = [], None, False
    container.seek(0, backward=True, any_frame=False)
    try:
        for packet in container.demux(stream):
            if not _decode_into(scan, packet):
                return
    except FFmpegError:
        scan.cut = True


def _timeline(shown: list[tuple[int | None, int]], step: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Ascending ticks of the shown frames, and their ordinals if their own timestamps are not ascending.

    A frame without a timestamp follows the one before it. Of two frames with one timestamp only the second
    is ever seen. Where time jumps back (clips joined without care) it goes on from the frame before.
    """
    own = [pts for pts, _ in shown]
    if None not in own and all(a < b for a, b in zip(own, own[1:], strict=False)):
        return np.array(own, dtype=np.int64), None
    ticks: list[int] = []
    ordinals: list[int] = []
    shift, previous = 0, None
    for ordinal, (pts, _) in enumerate(shown):
        if pts is None:
            tick = ticks[-1] + step if ticks else 0
        elif previous is not None and pts < previous:
            tick = ticks[-1] + step
            shift = tick - pts
        else:
            tick = pts + shift
        previous = pts if pts is not None else previous
        if ticks and tick <= ticks[-1]:
            ordinals[-1] = ordinal
            continue
        ticks.append(tick)
        ordinals.append(ordinal)
    return np.array(ticks, dtype=np.int64), np.array(ordinals, dtype=np.int64)


def _frame_ticks(stream: VideoStream, scan: _Scan, time_base: Fraction) -> int:
    """How long a frame is if nothing else says so."""
    if scan.shown[0][1]:
        return scan.shown[0][1]
    rate = stream.average_rate or stream.base_rate or stream.guessed_rate or Fraction(25)
    return max(1, round(1 / (rate * time_base)))


Entry = Literal["idr", "recovery", "none"]


def _entry_test(stream: VideoStream) -> Callable[[av.Packet], Entry]:
    """Whether decoding from a key packet on is exact. H.264 also flags key frames after which it is not."""
    if stream.codec_context.name != "h264":
        return lambda packet: "recovery"
    extra = stream.codec_context.extradata or b""
    prefix = (extra[4] & 3) + 1 if len(extra) > 4 and extra[0] == 1 else 0
    return lambda packet: h264_entry(bytes(packet), prefix)


def h264_entry(data: bytes, prefix: int) -> Entry:
    """How an H.264 packet can be entered: idr (nothing before it matters), recovery (what is shown after it
    is exact), none. `prefix` is the byte count of length fields, 0 for start codes.
    """
    found: Entry = "none"
    for at, end in _nal_units(data, prefix):
        kind = data[at] & NAL_TYPE
        if kind == NAL_IDR:
            return "idr"
        if kind == NAL_SEI and _recovers_at_once(data[at + 1 : end]):
            found = "recovery"
    return found


def _nal_units(data: bytes, prefix: int) -> Iterator[tuple[int, int]]:
    at = 0
    while prefix and at + prefix < len(data):
        begin = at + prefix
        at = begin + int.from_bytes(data[at:begin], "big")
        yield begin, at
    while not prefix and (begin := data.find(b"\0\0\1", at) + 3) > 2 and begin < len(data):
        at = begin
        following = data.find(b"\0\0\1", at)
        yield begin, following if following > 0 else len(data)


def _recovers_at_once(messages: bytes) -> bool:
    """Whether SEI messages hold a recovery point of 0 frames (written as a first bit of 1)."""
    at = 0
    while at + 2 < len(messages):
        sizes = [0, 0]
        for field in (0, 1):
            while at < len(messages) and messages[at] == 255:
                sizes[field] += 255
                at += 1
            sizes[field] += messages[at] if at < len(messages) else 0
            at += 1
        if sizes[0] == SEI_RECOVERY:
            return at < len(messages) and messages[at] >= 128
        at += sizes[1]
    return False


def _ends_early(container: InputContainer, stream: VideoStream, scan: _Scan, file_bytes: int) -> bool:
    """Whether the container names data behind the end of the file, or a later end of this stream."""
    if container.format.name.startswith("mov"):
        entries = stream.index_entries
        tail = (entries[i] for i in range(max(0, len(entries) - 64), len(entries)))
        return any(entry.pos + entry.size > file_bytes for entry in tail)
    declared = stream.metadata.get("DURATION", "").split(":")
    timed = [pts + (duration or 0) for pts, duration, *_ in scan.packets if pts is not None]
    if len(declared) != 3 or not timed:
        return False
    hours, minutes, seconds = map(float, declared)
    missing_s = hours * 3600 + minutes * 60 + seconds - float(max(timed) * stream.time_base)
    return missing_s > 0.5


def _turn_of(frame: VideoFrame) -> tuple[int, int, int, int]:
    """Signs of the display matrix; turns that are no multiple of 90 degrees are left alone."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.sign(np.frombuffer(bytes(data), dtype=np.int32)[:5]).tolist()
            if (a and d and not b and not c) or (b and c and not a and not d):
                return a, b, c, d
    return IDENTITY


# Reading


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
        with _opened(index.path) as container:
            stream = container.streams[index.stream]
            threads = 1 if index.ordinals is not None or index.cut else _threads(index)
            stream.codec_context.thread_count = threads
            if threads > 1:
                stream.thread_type = "AUTO"
            pick = _by_time if index.ordinals is None else _by_ordinal
            for frame in pick(container, stream, index, positions):
                yield _upright(frame, index)
    except FFmpegError as error:
        raise VideoError("undecodable", f"{index.path}: {_words(error)}") from error


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
        frame, passed = _advance(frames, frame, target)
        if frame is None or frame.pts != target:
            # A seek may land late, or on a key frame that is not one after all: start one earlier.
            earlier = int(index.keys[key - 1, 1]) if key > 0 else None
            frames = _decode_from(container, stream, earlier, rewind=True)
            frame, passed = _advance(frames, None, target)
            if frame is None or frame.pts != target:
                frame = passed or frame
        if frame is None:
            raise VideoError("undecodable", f"{index.path}: no frame at {index.times_s[position]:.3f} s")
        yield frame


def _is_ahead(index: Index, key: int, frame: VideoFrame | None) -> bool:
    """Whether the key frame lies so far after the last decoded frame that a seek saves decoding."""
    reached = int(index.ticks[0]) if frame is None else frame.pts
    between = np.searchsorted(index.ticks, [reached, index.keys[key, 0]])
    return int(between[1] - between[0]) > 2


def _advance(
    frames: Iterator[VideoFrame], frame: VideoFrame | None, target: int
) -> tuple[VideoFrame | None, VideoFrame | None]:
    """Decode up to the frame of `target`: it, or the first one past it, or the last; and the one before."""
    before = None
    while frame is None or frame.pts is None or frame.pts < target:
        before, frame = frame, next(frames, None)
        if frame is None:
            return before, before
    return frame, before


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
    raise VideoError("undecodable", f"{index.path}: the file gives fewer frames than when it was opened")


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
                if begun:
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


# Opening


def _opened(path: str) -> InputContainer:
    """Raises VideoError undecodable. No other protocol than files: a playlist cannot reach the network."""
    try:
        return av.open(path, options={"protocol_whitelist": "file"}, metadata_errors="ignore")
    except (FFmpegError, OSError, ValueError) as error:
        raise VideoError("undecodable", f"{path}: not a video that can be read ({_words(error)})") from error


def _video_stream(container: InputContainer, path: str) -> VideoStream:
    """The first video stream that is not a cover picture. Raises VideoError no_video."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise VideoError("undecodable", f"{path}: its video codec is not known")
            return stream
    cover = " (its only picture is a cover)" if container.streams.video else ""
    raise VideoError("no_video", f"{path}: holds no video{cover}")


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
