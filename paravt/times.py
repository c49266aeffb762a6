"""One reader of times and windows.

A time is a number of seconds from the first shown frame, or a text that says the same:

    90    "90"    "90s"    "90.5"    "1:30"    "00:01:30"    "1:30.5"    " 12.3 seconds"    "<12.3 seconds>"

A window is [start_s, end_s], with its end after its start. One that reaches out of the video is cut to it and
carries a note that says so; one that is empty, inverted or wholly outside has no frame, so it is refused.
Notes and errors are sentences for the model: they go back to it in the place of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
import math
from numbers import Real
import re

SLACK_S = 1e-6  # below this, a difference is rounding and no cut

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_SECONDS = re.compile(rf"([-+]?(?:{_NUMBER}))\s*(?:s|secs?|seconds?)?\.?", re.I | re.A)
_CLOCK = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):(\d{1,2}(?:\.\d*)?)\s*(?:s|secs?|seconds?)?", re.I | re.A)
_SHOWN_CHARS = 40
_HOW = "write seconds such as 12.5, or minutes and seconds such as 1:30"


class TimeError(ValueError):
    """A time or window that cannot be used; the message can be shown to the model as it is."""


@dataclass(frozen=True)
class Window:
    """A part of a video in seconds. `note` says how the asked window was cut; it is empty if it was not."""

    start_s: float
    end_s: float
    clamped: bool = False
    note: str = ""


def parse_time(value: object) -> float:
    """A time in seconds, finite and not negative.

    Raises TimeError for everything else: bool, None, NaN, infinity, a negative time, a text that is no time.
    """
    time_s = _signed_time(value, "time")
    if time_s < 0:
        raise TimeError(f"time {_shown(value)} is before the start of the video; times start at 0")
    return time_s + 0.0  # -0.0 becomes 0.0


def parse_window(start: object, end: object, duration_s: float) -> Window:
    """The part of a video of `duration_s` seconds that a call asks for, cut to [0, duration_s].

    A negative start is a window partly outside: it is cut to 0. Raises TimeError if a time cannot be read, or
    if nothing of the video lies in the window.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s is {duration_s}; a video that can be cut lasts longer than 0 seconds")
    start_s, end_s = _signed_time(start, "start_time"), _signed_time(end, "end_time")
    lasts = f"the video lasts {duration_s:.1f} seconds"
    if end_s < start_s:
        raise TimeError(f"the window ends at {end_s:.10g} before it starts at {start_s:.10g} s; {lasts}")
    if end_s == start_s:
        raise TimeError(f"the window is empty: it starts and ends at {start_s:.10g} seconds; {lasts}")
    if start_s >= duration_s:
        raise TimeError(f"the window starts at {start_s:.10g} seconds, after the end; {lasts}")
    if end_s <= 0:
        raise TimeError(f"the window ends at {end_s:.10g} seconds, before the video starts; {lasts}")
    cut_s = max(0.0, start_s), min(float(duration_s), end_s)
    if start_s >= -SLACK_S and end_s <= duration_s + SLACK_S:
        return Window(*cut_s)
    note = f"The window was cut to {cut_s[0]:.1f}-{cut_s[1]:.1f} seconds: {lasts}."
    return Window(*cut_s, clamped=True, note=note)


def _signed_time(value: object, name: str) -> float:
    """A finite time that may be negative; `name` is what the error calls it."""
    if isinstance(value, str):
        time_s = _read_text(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        try:
            time_s = float(value)
        except OverflowError:
            time_s = math.inf
    else:
        time_s = None
    if time_s is None or not math.isfinite(time_s):
        raise TimeError(f"{name} {_shown(value)} is not a time; {_HOW}")
    return time_s


def _read_text(text: str) -> float | None:
    text = text.strip()
    if text.startswith("<") and text.endswith(">"):  # a time mark, copied whole
        text = text[1:-1].strip()
    if match := _SECONDS.fullmatch(text):
        return float(match[1])
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds = int(match[1] or 0), int(match[2]), float(match[3])
        if seconds < 60 and (match[1] is None or minutes < 60):
            return hours * 3600 + minutes * 60 + seconds
    return None


def _shown(value: object) -> str:
    """The value as the error quotes it: short, and unable to carry tags into a prompt."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python may refuse to print it
        value = "a huge number"
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
    return "'" + re.sub(r"[^\w .:,+\-]", "?", text) + "'"
