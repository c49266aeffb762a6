"""The needle split: held-out questions of the needle world.

Kinds are in turn in the table (shape, same, when, name), so its first n questions are as mixed as the whole.
"""

from __future__ import annotations

from pathlib import Path

from paravt.benchmarks.registry import Benchmark, Place, Questions, register
from paravt.rollout import Sample, read_samples


def load(folder: Path) -> list[Sample]:
    """The questions of `folder`/eval.jsonl, in table order. FileNotFoundError says what to run."""
    table = Path(folder) / "eval.jsonl"
    if not table.is_file():
        raise FileNotFoundError(f"{table} is missing; run `dvc repro validate` first")
    return read_samples(table)


def load_place(place: Place) -> Questions:
    samples = load(place.needles)
    return Questions(samples, len(samples))


NEEDLES = register(Benchmark("needles", load_place, by=("kind",)))
