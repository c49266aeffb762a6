"""What is kept of one run of the study: a value per question and per step, as one small JSON file in git.

    {"arm", "seed", "overrides", "ids", "types",
     "asked": [{"temperature", "budget", "question": [...], "status": [...], "score": [...], ...}],
     "curves": {"reward/format": [one value a step], ...}}

`question` holds places in `ids`; the other lists of a part run beside it. Values per question, since
intervals and paired differences need them; texts and frames are in the tracked runs. No times: two runs of
the same thing write the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
import json
from pathlib import Path
from typing import Any

from paravt.benchmarks.results import Result

VALUES = ("status", "score", "format", "compliant", "calls")
CURVES = (
    "reward/total",
    "reward/accuracy",
    "reward/format",
    "reward/tool",
    "compliance",
    "calls/run",
    "entropy_structural",
    "entropy_other",
    "groups_without_spread",
    "tokens_per_episode",
    "ref_kl",
)


@dataclass(frozen=True)
class Record:
    """One run: its results question by question, its curves step by step (empty for what was not trained)."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    results: tuple[Result, ...]
    curves: Mapping[str, Sequence[float | None]]


def to_json(record: Record) -> dict[str, Any]:
    ids = list(dict.fromkeys(result.id for result in record.results))
    places = {name: place for place, name in enumerate(ids)}
    types = {result.id: result.question_type for result in record.results}
    asked = []
    for (temperature, budget), rows in groupby(record.results, key=lambda r: (r.temperature, r.budget)):
        part = list(rows)
        columns = {name: [_short(getattr(row, name)) for row in part] for name in VALUES}
        asked.append(
            {
                "temperature": temperature,
                "budget": budget,
                "question": [places[row.id] for row in part],
                **columns,
            }
        )
    return {
        "arm": record.arm,
        "seed": record.seed,
        "overrides": list(record.overrides),
        "ids": ids,
        "types": [types[name] for name in ids],
        "asked": asked,
        "curves": {name: [_short(value) for value in values] for name, values in record.curves.items()},
    }


def from_json(data: Mapping[str, Any]) -> Record:
    """The inverse, but for keys and texts. Raises KeyError, TypeError or ValueError for what is no record."""
    results = []
    for part in data["asked"]:
        columns = [part["question"], *(part[name] for name in VALUES)]
        for place, *values in zip(*columns, strict=True):
            fields = dict(zip(VALUES, values, strict=True))
            fields["compliant"] = None if fields["compliant"] is None else bool(fields["compliant"])
            results.append(
                Result(
                    key="",
                    id=data["ids"][place],
                    question_type=data["types"][place],
                    budget=part["budget"],
                    temperature=part["temperature"],
                    **fields,
                )
            )
    return Record(data["arm"], data["seed"], tuple(data["overrides"]), tuple(results), data["curves"])


def write_record(path: Path, record: Record) -> None:
    """One line a part, so that a change is seen where it is."""
    data = to_json(record)
    lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in data.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    fresh.replace(path)


def read_records(folder: Path) -> list[Record]:
    """All runs in `folder`, by name. Raises ValueError naming the first file that is no record."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(from_json(json.loads(path.read_text(encoding="utf-8"))))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{path} is no result of the study ({error}); remove it and run again"
            ) from error
    return records


def read_curves(metrics_path: Path) -> dict[str, list[float | None]]:
    """The curves that are kept, from a trainer's metrics file; None where a step has no value."""
    lines = metrics_path.read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines if line.strip()]
    return {name: [step.get(name) for step in steps] for name in CURVES}


def _short(value: Any) -> Any:
    """Six digits are enough here; whole numbers and truth values as integers."""
    if isinstance(value, float):
        value = round(value, 6)
        return int(value) if value.is_integer() else value
    return int(value) if isinstance(value, bool) else value


def _value(value: Any) -> str:
    def line(part: Any) -> str:
        return json.dumps(part, ensure_ascii=False, separators=(",", ":"))

    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(line(part) for part in value) + "\n ]"
    if isinstance(value, dict):
        inner = ",\n  ".join(f"{json.dumps(key)}: {line(part)}" for key, part in value.items())
        return f"{{\n  {inner}\n }}" if value else "{}"
    return line(value)
