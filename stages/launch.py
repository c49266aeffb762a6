"""A stage in several processes: `python -m stages.sft` starts them, by accelerate, if `train` asks for more.

The command becomes accelerate's launcher, so that whoever stops or watches the stage stops and watches all
of it. Each process runs the stage; the first one tracks it and writes, the others are silent. How weights
lie over the processes stands in conf/accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
import os
from pathlib import Path
import sys

from paravt.config import Params, TrainConfig
from paravt.reporter import LogReporter
from paravt.rollout import Sample
from stages.params import ROOT
from stages.tracking import StageReporter, stage_run

LAYOUTS = {"none": "replicated", "fsdp2": "fsdp2"}
STARTED = "LOCAL_RANK"  # the launcher tells each process its number


def launcher(module: str, train: TrainConfig, count: int) -> list[str]:
    """The command that runs `module` in `count` processes."""
    layout = ROOT / "conf" / "accelerate" / f"{LAYOUTS[train.sharding]}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(layout)]
    # a free port: two trainings on a machine do not meet
    return [*command, "--num_processes", str(count), "--main_process_port", "0", "-m", module]


def spread(module: str, train: TrainConfig, count: int) -> None:
    """Become the launcher of `count` processes, unless it is one or this is one of them."""
    if count == 1 or STARTED in os.environ:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    elif torch.cuda.device_count() < count:
        found = torch.cuda.device_count()
        raise ValueError(
            f"train.processes asks for {count} GPUs and there are {found}; write that many, or set "
            "CUDA_VISIBLE_DEVICES"
        )
    command = launcher(module, train, count)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


@dataclass
class _Folder:
    folder: Path


@dataclass
class Follower(LogReporter):
    """What a process that is not the first has for a reporter: the shared scratch folder, and silence."""

    scratch: _Folder
    dropped: dict[str, int] = field(default_factory=dict)

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        """The first process has the same."""

    def know(self, samples: Sequence[Sample]) -> None:
        """Nothing is shown here."""

    def summary(self, values: Mapping[str, float]) -> None:
        """The first process has the same."""


@contextmanager
def shared_run(name: str, params: Params) -> Iterator[StageReporter | Follower]:
    """`stage_run` in the first process of a stage; the others follow it into the same scratch folder."""
    if STARTED not in os.environ:
        with stage_run(name, params) as reporter:
            yield reporter
        return
    from accelerate import PartialState

    from paravt.parallel import PATIENCE, tell

    PartialState(timeout=PATIENCE)  # makes the process group
    if int(os.environ["RANK"]) == 0:
        with stage_run(name, params) as reporter:
            tell(str(reporter.scratch.folder))
            yield reporter
    else:
        yield Follower(_Folder(Path(tell())))
