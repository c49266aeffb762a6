"""Teacher traces for the needle world: what a good agent writes, worked out from what it sees.

A trace uses only the overview frames and the reports, never the true boundaries: a window runs from the last
overview frame before a part to the first one after it. Each step is a local copy of something near, the kind
of step a small transformer learns: list each frame, note a part's window where its frames begin and end, read
the reports the same way, then walk through the options one by one.

    find red                                        the colours asked about
    0.0 red red from 0.0                       one line per overview frame: time, colour, shape if seen
    8.2 red circle
    16.4 blue red to 16.4

A sub-agent lists its crop in the same way and marks where a shape starts and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import json

from paravt.data.needles import Scene
from paravt.rollout import LETTERS, Sample


@dataclass(frozen=True)
class Look:
    """A window worth a crop, for one asked colour."""

    colour: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """Assistant texts of one episode (after the forced `<think>` and newline), and the windows between."""

    turns: tuple[str, ...]
    looks: tuple[Look, ...]


def _seen(scene: Scene, times_s: Sequence[float]) -> list[tuple[float, str, str | None]]:
    """(time, colour, shape or None) of each frame."""
    rows = []
    for time_s in times_s:
        part = scene.part_at(time_s)
        rows.append((float(time_s), part.colour, part.shape if part.shows_at(time_s) else None))
    return rows


def report_text(scene: Scene, times_s: Sequence[float]) -> str:
    """A sub-agent's report on crop frames at `times_s`: a line a frame, each shape's start and end marked."""
    rows = _seen(scene, times_s)
    lines = []
    for i, (time_s, colour, shape) in enumerate(rows):
        line = f"{time_s:.1f} {colour}"
        if shape:
            line += f" {shape}"
            if i == 0 or rows[i - 1][1:] != (colour, shape):
                line += f" starts {colour} {time_s:.1f}"
            if i == len(rows) - 1 or rows[i + 1][1:] != (colour, shape):
                line += f" ends {colour} {time_s:.1f}"
        lines.append(line)
    return "\n".join(lines)


def _listing(
    rows: Sequence[tuple[float, str, str | None]], asked: Sequence[str]
) -> tuple[list[str], list[Look]]:
    lines, starts, looks = [], {}, []
    for i, (time_s, colour, shape) in enumerate(rows):
        line = f"{time_s:.1f} {colour}" + (f" {shape}" if shape else "")
        before = rows[i - 1] if i else None
        if before and before[1] != colour and before[1] in asked:
            line += f" {before[1]} to {time_s:.1f}"
            looks.append(Look(before[1], starts[before[1]], time_s))
        if colour in asked and (before is None or before[1] != colour):
            starts[colour] = before[0] if before else time_s
            line += f" {colour} from {starts[colour]:.1f}"
        if i == len(rows) - 1 and colour in asked:
            line += f" {colour} to {time_s:.1f}"
            looks.append(Look(colour, starts[colour], time_s))
        lines.append(line)
    return lines, looks


def call_text(look: Look) -> str:
    arguments = {"start_time": round(look.start_s, 1), "end_time": round(look.end_s, 1)}
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def main_trace(
    scene: Scene,
    sample: Sample,
    overview_s: Sequence[float],
    use_tool: bool,
    crop_times_s: Sequence[Sequence[float]] | None = None,
) -> Trace:
    """The main agent's turns. With the tool: dispatch, then gather from reports on `crop_times_s`.

    Without it the answer comes from the overview; a shape that no overview frame shows is named all the same,
    as public chain-of-thought traces made at a fixed frame count do: a guess that the frames do not support.
    """
    asked: list[str] = sample.meta["asked"]
    rows = _seen(scene, overview_s)
    lines, looks = _listing(rows, asked)
    listing = "\n".join(["find " + " and ".join(asked), *lines])
    if not use_tool:
        seen = {colour: [t for t, c, shape in rows if c == colour and shape] for colour in asked}
        return Trace((f"{listing}\n{_conclude(scene, sample, seen, looks)}",), ())
    calls = "\n".join(call_text(look) for look in looks)
    dispatch = f"{listing}\n</think>\n{calls}"
    if crop_times_s is None:
        return Trace((dispatch,), tuple(looks))
    seen = {}
    for colour in asked:
        frames = [t for times in crop_times_s for t, c, shape in _seen(scene, times) if c == colour and shape]
        seen[colour] = sorted(set(frames))
    return Trace((dispatch, _conclude(scene, sample, seen, looks)), tuple(looks))


def _conclude(scene: Scene, sample: Sample, seen: dict[str, list[float]], looks: Sequence[Look]) -> str:
    """The closing steps: what each asked part showed, then the answer by a walk through the options."""
    asked: list[str] = sample.meta["asked"]
    shapes = [scene.part_of(colour).shape for colour in asked]
    lines = [f"{colour} {shape}" for colour, shape in zip(asked, shapes, strict=True)]
    match sample.meta["kind"]:
        case "when":
            look = next(look for look in looks if look.colour == asked[0])
            times = seen[asked[0]] or [look.start_s, look.end_s]
            lines.append(f"starts {times[0]:.1f} ends {times[-1]:.1f}")
            answer = f"{times[0]:.1f} to {times[-1]:.1f}"
        case "name":
            answer = shapes[0]
        case "same" | "shape" as kind:
            found = shapes[0] if kind == "shape" else ("same" if shapes[0] == shapes[1] else "different")
            if kind == "same":
                lines.append(found)
            for letter, option in zip(LETTERS, sample.options, strict=False):
                lines.append(f"{letter}. {option} {'yes' if option == found else 'no'}")
                if option == found:
                    break
            answer = letter
    return "\n".join(lines) + f"\n</think>\n<answer>{answer}</answer>"
