"""The arms of the study, read from study/arms.yaml: a label for people, overrides for the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paravt.config import Params
from stages.params import ROOT, ParamsError, check, compose, read_yaml

HOME = Path("study")
FILE = HOME / "arms.yaml"
RESULTS = HOME / "results"
SCRATCH = Path(".scratch/study")  # what a run that was stopped needs to go on
GROUPS = ("main", "variants", "other_bases")
STARTS = {"base": "base", "sft": "SFT"}  # compared with, not trained


@dataclass(frozen=True)
class Arm:
    """One training recipe from the checkpoint in `start`. Without overrides the checkpoint is only asked."""

    name: str
    label: str
    start: Path
    overrides: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        return bool(self.overrides)


@dataclass(frozen=True)
class Base:
    """How models/tiny-base is taught other habits: factor on its loose ones, share of episodes with calls."""

    looseness: float
    tool_share: float
    steps: int
    clips: int


@dataclass(frozen=True)
class Study:
    """All arms by name, with the seeds of each; bases with other habits by name."""

    scale: str
    arms: dict[str, Arm]
    seeds: dict[str, tuple[int, ...]]
    bases: dict[str, Base]

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
        starts = {name: Path("models") / name for name in STARTS}
        starts |= {name: HOME / "starts" / name for name in data["bases"]}
        labels = STARTS | {name: values["label"] for name, values in data["bases"].items()}
        arms = {name: Arm(name, labels[name], folder) for name, folder in starts.items()}
        seeds: dict[str, tuple[int, ...]] = {name: (1,) for name in arms}
        bases = {
            name: Base(
                float(values["looseness"]), float(values["tool_share"]), values["steps"], values["clips"]
            )
            for name, values in data["bases"].items()
        }
        for name, values in data["arms"].items():
            start = starts[values.get("start", "sft")]
            arms[name] = Arm(name, values["label"], start, tuple(values["overrides"]))
        for group in GROUPS:
            seeds |= {name: tuple(data[group]["seeds"]) for name in data[group]["arms"]}
        return Study(data["scale"], arms, seeds, bases)
    except (KeyError, TypeError) as error:
        raise ParamsError(f"{FILE} lacks {error}; see the comment at its head") from None
