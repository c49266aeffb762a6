"""What a file shows and when: one demux pass, checked by decoding where containers lie.

The index holds the presentation time of each frame that is really shown, ascending. A straight PyAV decode is
the definition: declared counts and rates are never believed, packets that do not decode are not counted, and
a file whose bytes end early is cut off where that decode stops. Short clips are decoded whole while they are
indexed; of long ones the beginning and the last group of pictures are, and packets in between are believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
import re

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
import numpy as np

from paravt.reading.container import Stamp, VideoError, open_container, stamp_of, video_stream, words
from paravt.reading.h264 import Entry, h264_entry, length_prefix

VERIFY_PIXELS = 60_000_000  # decoded at most while indexing: about a quarter of a second
TAIL_PIXELS = 600_000_000  # a last group of pictures longer than this is believed without decoding
DECORD_PIXELS = 40_000  # a frame smaller than this decodes faster than decord seeks
DECORD_FILE_BYTES = 64 * 2**20  # decord demuxes the whole file each time it opens it
MISSING_S = 0.5  # a Matroska stream that ends this much before its declared end is cut off
IDENTITY = (1, 0, 0, 1)


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
    damaged: bool = False  # a packet did not decode, or a picture is flagged as broken
    plain: bool = True  # each packet is shown, each key frame is an IDR, one size throughout
    problem: str = ""


def build_index(path: str) -> Index:
    """Index one file. Raises VideoError missing, empty, no_video or undecodable.

    A file that is cut off is indexed up to its last good frame, with `cut` set.
    """
    stamp = stamp_of(path)
    with open_container(path) as container:
        stream = video_stream(container)
        scan = _scan(container, stream)
        if scan.first is None:
            why = scan.problem or "it holds no frame"
            raise VideoError("undecodable", f"no frame of its video can be decoded ({why})")
        if not scan.whole:
            _complete(container, stream, scan)
        scan.cut = scan.cut or _ends_early(container, stream, scan, stamp[0])
        return _make_index(path, stamp, container, stream, scan)


def _make_index(
    path: str, stamp: Stamp, container: InputContainer, stream: VideoStream, scan: _Scan
) -> Index:
    time_base = Fraction(stream.time_base or scan.first.time_base)
    step = _frame_ticks(stream, scan, time_base)
    ticks, ordinals = _timeline(scan.shown, step)
    if scan.damaged and scan.whole and ordinals is None:
        ordinals = np.arange(len(ticks))  # what follows damage depends on where decoding began
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
    step = (ticks[-1] - ticks[0]) / max(1, len(ticks) - 1)
    return bool(np.all(np.abs(ticks - even) <= min(1.0, step / 10)))


def _scan(container: InputContainer, stream: VideoStream) -> _Scan:
    """One demux pass, decoding until the budget is spent."""
    scan = _Scan([], [])
    budget = VERIFY_PIXELS
    entry_of = _entry_test(stream)
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard and not packet.is_corrupt:
                entry = entry_of(packet) if packet.is_keyframe else "none"
                scan.plain &= entry == "idr" or not packet.is_keyframe and bool(scan.packets)
                seek = packet.dts if packet.dts is not None else packet.pts
                scan.packets.append((packet.pts, packet.duration, seek or 0, entry != "none"))
            scan.plain &= not packet.is_discard
            if scan.whole and not _decode_into(scan, packet):
                break
            size = stream.codec_context
            budget -= size.width * size.height if packet.size else 0
            scan.whole &= budget > 0 or not scan.shown
    except FFmpegError as error:
        scan.cut, scan.problem = True, words(error)
    return scan


def _decode_into(scan: _Scan, packet: av.Packet) -> bool:
    """Decode one packet; False if it is the cut one at which a straight decode stops.

    A whole packet that does not decode is declared but not shown: it is passed over.
    """
    try:
        frames = packet.decode()
    except FFmpegError as error:
        scan.problem = words(error)
        scan.damaged |= bool(scan.shown)
        scan.cut = packet.is_corrupt and bool(scan.shown)
        return not scan.cut
    for frame in frames:
        scan.first = scan.first or frame
        scan.damaged |= frame.is_corrupt
        scan.plain &= (frame.width, frame.height) == (scan.first.width, scan.first.height)
        scan.shown.append((frame.pts, frame.duration or 0))
    return True


def _complete(container: InputContainer, stream: VideoStream, scan: _Scan) -> None:
    """Complete a list of shown frames that was decoded at its beginning only.

    The last group of pictures is decoded too; in between, each packet that has a time is believed. If packets
    and frames already disagree at the beginning, only decoding all of it tells.
    """
    head = scan.shown
    timed = sorted((pts, duration or 0) for pts, duration, *_ in scan.packets if pts is not None)
    distinct = len(timed) == len(scan.packets) == len({pts for pts, _ in timed})
    last = head[-1][0]
    if not distinct or last is None or not _head_agrees(head, timed):
        _decode_all(container, stream, scan)
        return
    key, seek = max(((pts, seek) for pts, _, seek, exact in scan.packets if exact), default=(last, 0))
    after = [entry for entry in timed if entry[0] > last]
    tail = [entry for entry in after if entry[0] >= key]
    pixels = stream.codec_context.width * stream.codec_context.height
    if len(tail) * pixels > TAIL_PIXELS:
        scan.shown = head + after
    elif key <= last:
        _decode_all(container, stream, scan)
    else:
        end = _Scan([], [])
        _decode_to_end(container, stream, seek, end)
        seen = [entry for entry in end.shown if entry[0] is not None and entry[0] >= key]
        scan.cut |= end.cut
        scan.shown = head + [entry for entry in after if entry[0] < key] + (seen if end.cut else seen or tail)


def _head_agrees(head: list[tuple[int | None, int]], timed: list[tuple[int, int]]) -> bool:
    """Whether the packets between the first and the last decoded frame are just those frames."""
    shown = [pts for pts, _ in head]
    return shown == [pts for pts, _ in timed if shown[0] <= pts <= shown[-1]] if None not in shown else False


def _decode_all(container: InputContainer, stream: VideoStream, scan: _Scan) -> None:
    scan.shown, scan.first, scan.cut, scan.whole = [], None, False, True
    _decode_to_end(container, stream, None, scan)


def _decode_to_end(container: InputContainer, stream: VideoStream, seek: int | None, scan: _Scan) -> None:
    try:
        if seek is None:
            container.seek(0)
        else:
            container.seek(seek, stream=stream)
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


def _entry_test(stream: VideoStream) -> Callable[[av.Packet], Entry]:
    """Whether decoding from a key packet on is exact; other codecs than H.264 flag only such packets."""
    if stream.codec_context.name != "h264":
        return lambda packet: "recovery"
    prefix = length_prefix(stream.codec_context.extradata)
    return lambda packet: h264_entry(bytes(packet), prefix)


def _ends_early(container: InputContainer, stream: VideoStream, scan: _Scan, file_bytes: int) -> bool:
    """Whether the container names data behind the end of the file, or a later end of this stream."""
    if container.format.name.startswith("mov"):
        entries = stream.index_entries
        tail = (entries[i] for i in range(max(0, len(entries) - 64), len(entries)))
        return any(entry.pos + entry.size > file_bytes for entry in tail)
    declared = re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", ""))
    ends = [pts + (duration or 0) for pts, duration, *_ in scan.packets if pts is not None]
    if declared is None or not ends:
        return False
    hours, minutes, seconds = map(float, declared.groups())
    return hours * 3600 + minutes * 60 + seconds - float(max(ends) * stream.time_base) > MISSING_S


def _turn_of(frame: VideoFrame) -> tuple[int, int, int, int]:
    """Signs of the display matrix; turns that are no multiple of 90 degrees are left alone."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.sign(np.frombuffer(bytes(data), dtype=np.int32)[:5]).tolist()
            if (a and d and not b and not c) or (b and c and not a and not d):
                return a, b, c, d
    return IDENTITY
