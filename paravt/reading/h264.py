"""Where an H.264 stream can be entered so that what follows is exact.

Containers flag key frames, but not all of them are entries: after an IDR slice nothing before it matters;
after a recovery point of 0 frames (an open group of pictures) everything shown later is exact; a recovery
point of n frames (intra refresh) gives n wrong pictures first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

NAL_TYPE, NAL_IDR, NAL_SEI, SEI_RECOVERY = 0x1F, 5, 6, 6

Entry = Literal["idr", "recovery", "none"]


def length_prefix(extradata: bytes | None) -> int:
    """How many bytes of length stand before each unit: 0 if start codes do."""
    return (extradata[4] & 3) + 1 if extradata and len(extradata) > 4 and extradata[0] == 1 else 0


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
