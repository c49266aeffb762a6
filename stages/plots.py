"""Pictures of the report as PNG bytes: no date, no version, so equal figures are equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure  # noqa: E402 - the backend comes first

COLOURS = ("#4a4a4a", "#1f77b4", "#d95f02", "#2a9d5c", "#8e44ad", "#b8860b")
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
}


class Point(NamedTuple):
    """A value at `x` with the limits of its interval."""

    x: float
    mean: float
    low: float
    high: float


def panels(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x_label: str) -> bytes:
    """One panel per title, one line per name: points (x, y). At most three panels a row."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
        for position, (title, lines) in enumerate(curves.items(), 1):
            axes = figure.add_subplot(rows, columns, position)
            for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
                marker = "o" if len(points) < 3 else None
                axes.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=1.4, marker=marker)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel(x_label)
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8)
        return _png(figure)


def intervals(
    series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, top: float | None = 1.0
) -> bytes:
    """One line per name with a bar for each point's interval; x values are named ticks."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.add_subplot()
        places = {
            x: place for place, x in enumerate(sorted({p.x for points in series.values() for p in points}))
        }
        for number, (colour, (name, points)) in enumerate(zip(COLOURS, series.items(), strict=False)):
            shift = 0.06 * (number - (len(series) - 1) / 2)  # intervals of one x stay apart
            x = [places[point.x] + shift for point in points]
            means = [point.mean for point in points]
            reach = [
                [max(0.0, point.mean - point.low) for point in points],
                [max(0.0, point.high - point.mean) for point in points],
            ]
            axes.errorbar(x, means, yerr=reach, color=colour, label=name, marker="o", markersize=4, capsize=3)
        axes.set_xticks(list(places.values()), [f"{x:g}" for x in places])
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(0, top)
        figure.legend(loc="outside right upper", frameon=False)
        return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
