"""The weights after each step, on their way to an engine that has weights of its own.

    folder    in the scratch folder, whole or absent; for any engine that takes folders
    memory    of the first process, for an engine that takes tensors

Either is a copy: training goes on while the engine may still have to load it. What every engine has replaced
is forgotten, and not what it has, which a server that died loads anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import shutil

import torch
from transformers import PreTrainedTokenizerBase

from paravt.engines.base import Engine
from paravt.export import export_weights, publish_model
from paravt.state import is_split
from paravt.training import TrainingRun


class Handover:
    """Between the training `run` and this process's `engine`, if it has one. All processes make one."""

    def __init__(self, run: TrainingRun, engine: Engine | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self.run, self.engine, self.tokenizer = run, engine, tokenizer
        takers = run.processes.gather(getattr(engine, "takes_tensors", None))
        self.in_memory = takers == [True, *[None] * (len(takers) - 1)]
        """Only the first process has whole weights, so no other may have an engine that wants them."""
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}

    def put(self, version: int) -> None:
        """Keep the present weights as `version`. All processes call this; raises CheckpointError if the disk
        does not take them.
        """
        model, dtype = self.run.model, self.run.dtype
        weights = export_weights(model, None if dtype == torch.float32 else dtype)
        if not self.in_memory:

            def write(target: Path) -> None:
                model.save_pretrained(target, state_dict=weights)
                self.tokenizer.save_pretrained(target)

            publish_model(self._folder(version), write)
        elif self.run.is_first:
            weights = model.state_dict() if weights is None else weights
            if not is_split(model):  # those of a split model were put together on the CPU already
                weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
            self._tensors[version] = weights

    def give(self, version: int) -> None:
        """Have the engine load `version`. Raises EngineError if it cannot."""
        if self.in_memory:
            self.engine.load_tensors(self._tensors[version], version)
        else:
            self.engine.load_weights(str(self._folder(version)), version)

    def forget_before(self, loaded: Sequence[int | None]) -> None:
        """`loaded` are the versions that the engines of all processes have, None where one has none yet."""
        if not self.run.is_first or None in loaded:
            return
        oldest = min(loaded)
        self._tensors = {version: kept for version, kept in self._tensors.items() if version >= oldest}
        for folder in self._home.glob("[0-9]*"):
            if folder.name.isdigit() and int(folder.name) < oldest:
                shutil.rmtree(folder)

    @property
    def _home(self) -> Path:
        return self.run.scratch / "engine-weights"

    def _folder(self, version: int) -> Path:
        return self._home / str(version)
