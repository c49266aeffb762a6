"""Opening a video file, and the one error for all that can be wrong with it."""

from __future__ import annotations

import os
import stat
from typing import Literal

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition
from av.video.stream import VideoStream

Reason = Literal["missing", "empty", "no_video", "undecodable", "truncated", "timeout"]
Stamp = tuple[int, int, int]


class VideoError(RuntimeError):
    """A video that cannot be read. `reason` is one of `Reason`, the text a sentence."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


def stamp_of(path: str) -> Stamp:
    """What tells one state of a file from another. Raises VideoError missing or empty."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise VideoError("missing", f"no such file ({words(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise VideoError("missing", "not a file")
    if found.st_size == 0:
        raise VideoError("empty", "the file is empty (0 bytes)")
    return found.st_size, found.st_mtime_ns, found.st_ino


def open_container(path: str) -> InputContainer:
    """Raises VideoError undecodable. No other protocol than files: a playlist cannot reach the network."""
    try:
        return av.open(path, options={"protocol_whitelist": "file"}, metadata_errors="ignore")
    except (FFmpegError, OSError, ValueError) as error:
        raise VideoError("undecodable", f"not a video that can be read ({words(error)})") from error


def video_stream(container: InputContainer) -> VideoStream:
    """The first video stream that is not a cover picture. Raises VideoError no_video."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise VideoError("undecodable", "its video codec is not known")
            return stream
    cover = " (its only picture is a cover)" if container.streams.video else ""
    raise VideoError("no_video", f"holds no video{cover}")


def words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
