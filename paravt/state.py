"""Weights and optimiser of a training, to a folder and back, however they lie over the processes.

    state.pt     what is small, and the tensors too where each process holds them whole
    shards/      the tensors where they are split; each process writes its own part (torch's dcp)

Either form is read into either layout, by any number of processes. Tensors are named as in the model, so
each is put together from whatever parts it was cut into.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

SHARDS = "shards"
DIGEST_VALUES = 16  # of a weight: all of 16 GB would take a minute at each start


def is_split(model: nn.Module) -> bool:
    """Whether the model's weights are split over processes."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights by name. Where they are split all processes must call this; the first gets them, on the
    CPU, the others an empty dict.
    """
    if not is_split(model):
        return model.state_dict()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def start_digest(model: nn.Module) -> str:
    """What tells the weights that a training starts from, from others: hex of a SHA-256 over each one's name,
    shape and first values in float32. Call it before they are trained or split.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        few = weight.detach().flatten()[:DIGEST_VALUES].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(weight.shape)} {few.tolist()}\n".encode())
    return digest.hexdigest()


def trained_names(model: nn.Module) -> list[str]:
    """Names of the weights that are trained, in the order in which an optimiser was given them."""
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def whole_state(model: nn.Module, optimiser: torch.optim.Optimizer, trained_only: bool) -> dict[str, Any]:
    """For state.pt, where each process holds everything. `trained_only`: leave the frozen weights out."""
    weights = model.state_dict()
    if trained_only:
        weights = {name: weights[name] for name in trained_names(model)}
    return {"model": weights, "optimiser": optimiser.state_dict()}


def load_whole_state(
    state: Mapping[str, Any], model: nn.Module, optimiser: torch.optim.Optimizer, trained_only: bool
) -> None:
    """The inverse of `whole_state`, into any layout."""
    if not is_split(model):
        model.load_state_dict(state["model"], strict=not trained_only)
        optimiser.load_state_dict(state["optimiser"])
        return
    options = StateDictOptions(full_state_dict=True, strict=not trained_only)
    set_model_state_dict(model, state["model"], options=options)
    if state["optimiser"]["state"]:
        named = _by_name(state["optimiser"], trained_names(model))
        set_optimizer_state_dict(model, optimiser, named, options=StateDictOptions(full_state_dict=True))


def write_shards(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """This process's part of weights and optimiser; all processes call it. Raises OSError, in all of them,
    if the disk does not take it.
    """
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimiser.state:
        tensors["optimiser"] = get_optimizer_state_dict(model, optimiser)
    try:
        dcp.save(tensors, checkpoint_id=folder / SHARDS)
    except CheckpointException as error:
        raise _cause(error) from error


def load_shards(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, has_optimiser: bool
) -> None:
    """The inverse of `write_shards`, into any layout."""
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if has_optimiser:
        tensors["optimiser"] = get_optimizer_state_dict(model, optimiser)
    dcp.load(tensors, checkpoint_id=folder / SHARDS)
    set_model_state_dict(model, tensors["model"])
    if has_optimiser:
        set_optimizer_state_dict(model, optimiser, tensors["optimiser"])


def _by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimiser's state with names where it has positions."""
    groups = [group | {"params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: kept for i, kept in state["state"].items()}, "param_groups": groups}


def _cause(error: CheckpointException) -> BaseException:
    """What a process met that ended a save: the disk's error if there is one."""
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0] if causes else error)
