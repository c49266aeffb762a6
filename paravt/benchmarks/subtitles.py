"""Subtitles of a video as lines in order of time, and as many of them as a prompt has room for.

    1                                        12.3-15.0 s: What is said in
    00:00:12,300 --> 00:00:15,000    ->      these seconds.
    <font color="...">What is said</font>

If all lines together are longer than the limit, lines are taken evenly over the whole video and the heading
says how many: cutting the end off would hide the end of each long video.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import html
import re
from typing import NamedTuple

from paravt.times import TimeError, parse_time


class Line(NamedTuple):
    start_s: float
    end_s: float
    text: str


_TIME = r"(?:\d{1,4}:)?\d{1,2}:\d{1,2}[,.]\d{1,3}"
_CUE = re.compile(rf"^[ \t]*({_TIME})[ \t]*-->[ \t]*({_TIME})", re.MULTILINE | re.ASCII)
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{\\[^{}]*\}")
_NUMBER = re.compile(r"\n\s*\d+\s*$", re.ASCII)


def read_srt(text: str) -> list[Line]:
    """The lines of an SRT text in order of time, without markup; repeats of the line before are joined.

    Never raises: a cue whose times cannot be read or run backwards is passed over, as players do.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    cues = list(_CUE.finditer(text))
    lines = []
    for number, cue in enumerate(cues):
        last = number + 1 == len(cues)
        body = text[cue.end() : len(text) if last else cues[number + 1].start()].partition("\n")[2]
        body = body if last else _NUMBER.sub("", "\n" + body.rstrip())
        said = _plain(body)
        try:
            start_s, end_s = (parse_time(time.replace(",", ".")) for time in cue.groups())
        except TimeError:
            continue
        if said and start_s <= end_s:
            lines.append(Line(start_s, end_s, said))
    return _joined(lines)


def shown(lines: Sequence[Line], limit: int, count_tokens: Callable[[str], int]) -> tuple[str, int]:
    """(text, lines in it): all lines if they fit into `limit` tokens, else as many as fit, evenly spread.

    ("", 0) if not one line fits.
    """
    if not lines:
        return "", 0
    low, high = 0, len(lines)
    text = _text(lines, high)
    if count_tokens(text) <= limit:
        return text, high
    while low + 1 < high:
        middle = (low + high) // 2
        if count_tokens(_text(lines, middle)) <= limit:
            low = middle
        else:
            high = middle
    return (_text(lines, low), low) if low else ("", 0)


def _text(lines: Sequence[Line], count: int) -> str:
    step = len(lines) / count
    kept = [lines[int((number + 0.5) * step)] for number in range(count)]
    part = "" if count == len(lines) else f" ({count} of {len(lines)} lines, evenly over the video)"
    body = "\n".join(f"{line.start_s:.1f}-{line.end_s:.1f} s: {line.text}" for line in kept)
    return f"Subtitles{part}:\n{body}"


def _plain(text: str) -> str:
    return " ".join(html.unescape(_MARKUP.sub(" ", text)).split())


def _joined(lines: list[Line]) -> list[Line]:
    """In order of time; a text repeated at once (rolling captions) is one line."""
    joined: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.start_s, line.end_s)):
        if joined and joined[-1].text == line.text:
            joined[-1] = joined[-1]._replace(end_s=max(joined[-1].end_s, line.end_s))
        else:
            joined.append(line)
    return joined
