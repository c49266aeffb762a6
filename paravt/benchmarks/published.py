"""The published main table, and our results beside it with everything in which the protocols differ.

Published values are percent: accuracy, for charades mIoU. They come without intervals; ours are those of
questions drawn again and say nothing about another training run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paravt.benchmarks.summary import percent

COLUMNS = ("videomme", "videomme_wsub", "longvideobench", "lvbench", "mlvu", "mmvu", "charades")
SOURCE = "arXiv 2605.20342, table 1 (project page, 2026-05-19)"

# model, kind, one value per column
TABLE: tuple[tuple[str, str, tuple[float | None, ...]], ...] = (
    ("GPT-4o", "proprietary", (71.9, 77.2, 66.7, 34.7, 64.6, 66.7, None)),
    ("Gemini 1.5 Pro", "proprietary", (75.0, 81.3, 64.4, 33.1, 74.3, 65.8, None)),
    ("Qwen2.5-VL-7B", "direct", (55.7, 64.5, 46.4, 32.2, 47.8, 65.4, 31.6)),
    ("Video-R1-7B", "reasoning", (57.6, 66.0, 57.4, 36.9, 61.6, 61.3, 25.4)),
    ("VideoChat-R1-7B", "reasoning", (50.4, 58.2, 49.2, 23.8, 58.7, 65.0, 31.5)),
    ("VideoRFT-7B", "reasoning", (58.5, 65.6, 55.1, 38.0, 44.9, 42.7, 18.7)),
    ("Time-R1-7B", "reasoning", (58.9, 66.2, 56.0, 38.2, 60.5, 63.4, 34.7)),
    ("ReWatch-R1-7B", "reasoning", (58.8, 65.0, 53.6, 38.5, 60.1, 59.8, 20.2)),
    ("Video-Thinker-7B", "reasoning", (61.9, 65.3, 56.0, None, 65.2, 64.5, 29.0)),
    ("Qwen3-VL-8B (tool)", "agentic", (59.9, 68.4, 52.2, 33.1, 58.3, 68.0, 49.3)),
    ("Conan-7B", "agentic", (55.5, 62.8, 54.5, 38.2, 59.2, 64.0, 25.4)),
    ("LongVT-RFT-7B", "agentic", (59.5, 66.0, 54.7, 37.9, 59.4, 63.4, 23.4)),
    ("SAGE-7B", "agentic", (44.1, 52.4, 37.4, 31.8, 49.7, 55.7, 28.9)),
    ("VideoZoomer-7B", "agentic", (45.3, 48.3, 39.6, 22.9, 46.2, 61.6, None)),
    ("ParaVT-8B", "agentic", (62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1)),
)

ALWAYS = (
    "Published rows were scored by their release: letters are read by looser rules (the first isolated "
    "capital counts, so does the English word A), request errors are scored as wrong or leave the "
    "denominator. Here an answer is read by the reader of the rewards, and failed questions count as wrong.",
    "Published prompts ask agentic models for the option letter only and direct ones to think (the two are "
    "swapped in the release). Here each mode says what it means.",
)
BY_BENCHMARK = {
    "videomme": "Options are lettered once; the release letters them twice.",
    "videomme_wsub": "Subtitles in order of time up to a limit of tokens; the release takes the whole text.",
    "mlvu": "Micro accuracy, as published; lmms-eval has the macro mean, which `summary.json` has too.",
    "mmvu": "Over the choices; the release asks open questions as choices, which nobody can get right.",
    "charades": "Times are rounded to the annotated tenth; the release lets the server choose the frames.",
    "lvbench": "Unanswered questions stay in the denominator; the original script leaves them out.",
}


OURS = "this run"
BRACKETS = "Percent; charades is mIoU. Brackets: 95 % intervals of a bootstrap over questions."
Runs = Mapping[str, Mapping[str, Any]]
"""The summary of its folder, by the name of a run."""


def markdown(runs: Runs, beside: str = "ParaVT-8B") -> str:
    """One page: the table, what became of the questions, the differences.

    Raises ValueError if nothing of the table was run.
    """
    header, rows = side_by_side(runs, beside)
    rows = [[f"**{row[0]}**" if row[1] == OURS else row[0], *row[1:]] for row in rows]
    lines = ["# Beside the published table", "", f"Published: {SOURCE}.", ""]
    lines += _table(header, rows, words=2)
    lines += ["", BRACKETS, "", "## What became of the questions", ""]
    lines += _table(*states(runs), words=2)
    lines += ["", "## In what the protocols differ", "", *(f"- {text}" for text in protocols(runs))]
    return "\n".join(lines) + "\n"


def side_by_side(runs: Runs, beside: str = "ParaVT-8B") -> tuple[list[str], list[list[str]]]:
    """Header and rows: each run, its difference to the published row `beside`, then the published rows, for
    the benchmarks that were run.

    Raises ValueError if none of the table was run.
    """
    columns = run_columns(runs)
    if not columns:
        raise ValueError(f"none of {', '.join(COLUMNS)} was run; there is nothing to put beside the table")
    published = {model: dict(zip(COLUMNS, values, strict=True)) for model, _, values in TABLE}
    if beside not in published:
        raise ValueError(f"the published table has no {beside!r}; it has {', '.join(published)}")
    rows = []
    for name, run in runs.items():
        rows.append([name, OURS, *(_ours(run.get(column)) for column in columns)])
        gaps = [_gap(run.get(column), published[beside][column]) for column in columns]
        rows.append([f"{name} - {beside}", "difference", *gaps])
    for model, kind, _ in TABLE:
        values = [published[model][column] for column in columns]
        rows.append([model, kind, *("-" if value is None else f"{value:.1f}" for value in values)])
    return ["model", "kind", *columns], rows


def states(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Header and rows: how many questions of each run and benchmark ended in which state."""
    kinds = ("asked", "answered", "unparsed", "failed", "skipped")
    rows = []
    for name, run in runs.items():
        for column in run_columns(runs):
            if column in run:
                cells = [str(run[column]["counts"][kind]) for kind in kinds]
                rows.append([name, column, *cells, percent(run[column]["headline"]["answered"])])
    return ["run", "benchmark", *kinds, "of answered"], rows


def protocols(runs: Runs) -> list[str]:
    """One sentence for each thing in which these runs differ from the published ones."""
    columns = run_columns(runs)
    found = [*ALWAYS, *(f"{column}: {BY_BENCHMARK[column]}" for column in columns if column in BY_BENCHMARK)]
    for name, run in runs.items():
        told = dict.fromkeys(text for column in columns for text in differences(run.get(column) or {}))
        found += [f"{name}: {text}" for text in told]
    return found


def run_columns(runs: Runs) -> list[str]:
    """The benchmarks of the table that were run."""
    return [name for name in COLUMNS if any(name in run for run in runs.values())]


def differences(figures: Mapping[str, Any]) -> list[str]:
    """In what a run differs from the published protocol (64 frames, greedy, crops as images)."""
    asked = figures.get("asked")
    if not asked:
        return []
    episode, visual, table = asked["episode"], asked["visual"], figures.get("table") or {}
    found = []
    if asked["overview_frames"] != 64:
        found.append(f"{asked['overview_frames']} overview frames, published 64")
    if "upstream" in asked:
        found += asked["upstream"]["differs"]
    elif episode["mode"].startswith("agentic") and episode["dispatch"] != "frames":
        found.append("crops are reported in words by a sub-agent, published as images in the main context")
    if "upstream" not in asked:
        found.append(f"prompt mode {episode['mode']} in our words")
    found.append(f"frames of at most {visual['max_pixels']} pixels, published without a limit")
    if visual["time_marks"] and "upstream" not in asked:
        found.append("each frame is preceded by its time, published without")
    if episode["temperature"]:
        found.append(f"temperature {episode['temperature']:g}, published greedy")
    if asked.get("limit"):
        found.append(f"a draw of {asked['limit']} questions of each benchmark")
    if "endpoint" in asked:
        found.append(asked["endpoint"]["note"])
    rows, whole = table.get("rows"), table.get("published_rows")
    if whole and rows != whole:
        found.append(f"{figures['benchmark']}: a table of {rows} rows, published {whole}")
    if table.get("set_aside"):
        found.append(f"{figures['benchmark']}: {len(table['set_aside'])} rows that are no question")
    return found


def _ours(figures: Mapping[str, Any] | None) -> str:
    if not figures:
        return "-"
    part = figures["headline"]
    return f"{percent(part['strict'])} [{percent(part['low'])}, {percent(part['high'])}]"


def _gap(figures: Mapping[str, Any] | None, value: float | None) -> str:
    strict = (figures or {}).get("headline", {}).get("strict")
    return "-" if value is None or strict is None else f"{100 * strict - value:+.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Markdown; the first columns hold words, the others figures."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
