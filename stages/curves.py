"""What a training stage leaves in its report folder.

    metrics.jsonl   one line a step, as the trainer wrote it
    steps.csv       the same as a table, for `dvc plots`
    metrics.json    means over the last tenth of the steps, and how much was left out, by reason

No times: two runs of the same thing write the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import csv
import json
import math
from pathlib import Path
import shutil
from typing import Any

from paravt.training import TrainResult
from stages.outputs import write_json


def write_curves(folder: Path, result: TrainResult) -> dict[str, Any]:
    """The three files; returns what metrics.json holds."""
    shutil.copyfile(result.metrics_path, folder / "metrics.jsonl")
    lines = result.metrics_path.read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines if line.strip()]
    columns = list(dict.fromkeys(key for step in steps for key in step))
    with open(folder / "steps.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(steps)
    metrics = {
        "steps": result.steps,
        "left_out": dict(sorted(result.counts.items())),
        "last_tenth": _means(steps),
    }
    write_json(folder / "metrics.json", metrics)
    return metrics


def write_no_curves(folder: Path, columns: Sequence[str]) -> None:
    """The three files of a stage that took a published model and trained nothing; `columns` are those that
    plots ask for.
    """
    (folder / "metrics.jsonl").touch()
    (folder / "steps.csv").write_text(",".join(("step", *columns)) + "\n", encoding="utf-8")
    write_json(folder / "metrics.json", {"steps": 0, "left_out": {}, "last_tenth": {}})


def _means(steps: list[Mapping[str, float]]) -> dict[str, float]:
    last = steps[-math.ceil(len(steps) / 10) :]
    names = dict.fromkeys(key for step in last for key in step if key != "step")
    means = {}
    for name in names:
        values = [step[name] for step in last if name in step]
        means[name] = round(sum(values) / len(values), 6)
    return means
