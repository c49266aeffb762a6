"""The arms of the study, read from study/arms.yaml: a label for people, overrides for the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paravt.config import Params
from stages.params import ROOT, ParamsError, check, compose, read_yaml

FILE = Path("study/arms.yaml")
STARTS = {"base": "base", "sft": "SFT"}  # compared with, not trained


@dataclass(frozen=True)
class Arm:
    """One training recipe, or (`overrides` empty) a checkpoint that is only asked."""

    name: str
    label: str
    overrides: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        return self.name not in STARTS


@dataclass(frozen=True)
class Study:
    """All arms by name, with the seeds of each."""

    scale: str
    arms: dict[str, Arm]
    seeds: dict[str, tuple[int, ...]]

    def arm(self, name: str) -> Arm:
        """Raises ParamsError if the study has no such arm."""
        if name not in self.arms:
            raise ParamsError(f"{FILE} has no arm {name!r}; it has {', '.join(self.arms)}")
        return self.arms[name]

    def params(self, name: str, seed: int) -> Params:
        """The checked parameters of one run: the study's scale, the arm's overrides, the seed."""
        overrides = [f"scale={self.scale}", *self.arm(name).overrides, f"seed={seed}"]
        return check(compose(overrides), f"{FILE}: {name}")


def read_study(root: Path = ROOT) -> Study:
    """Raises ParamsError if the file is missing, is not YAML, or lacks a part."""
    data = read_yaml(root / FILE)
    try:
        arms = {name: Arm(name, label) for name, label in STARTS.items()}
        arms |= {
            name: Arm(name, values["label"], tuple(values["overrides"]))
            for name, values in data["arms"].items()
        }
        seeds: dict[str, tuple[int, ...]] = {name: (1,) for name in STARTS}
        for group in ("main", "variants"):
            seeds |= {name: tuple(data[group]["seeds"]) for name in data[group]["arms"]}
        return Study(data["scale"], arms, seeds)
    except (KeyError, TypeError) as error:
        raise ParamsError(f"{FILE} lacks {error}; see the comment at its head") from None
