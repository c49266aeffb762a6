"""The ways in which a server gets new weights (`engine.weight_transfer`).

    disk         the server reads a model folder that both sides see
    gloo, nccl   this process sends each tensor to the server's workers, over a group of their own (`link`);
                 no folder is shared, and none need be written

What goes wrong on the way ends as Lost: the group is given up, the next try makes another one. A server that
was not sent all of the weights still has the old ones, under a label that no answer may have.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paravt.config import VLLMEngineConfig
from paravt.engines.backend import Backend, Shipment
from paravt.engines.base import EngineError
from paravt.engines.link import Link, Tensors
from paravt.engines.tied import with_head

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FromDisk:
    """Weights in a folder that the server reads by itself."""

    folder: Path

    async def deliver(self, server: Backend) -> None:
        await server.rpc("reload_weights", weights_path=str(self.folder))


@dataclass(frozen=True)
class Broadcast:
    """Weights in this process's memory, by their names in a checkpoint."""

    tensors: Tensors

    async def deliver(self, server: Backend) -> None:
        kept, server.link = server.link, None  # it comes back if it holds
        link: Link = kept or await Link.open(server)
        await link.send(server, self.tensors)
        server.link = link


def shipment(weights: Path | Tensors, config: VLLMEngineConfig, aside: Path) -> Shipment:
    """`weights` as `config` wants them sent; a folder with tied embeddings may get its links in `aside`.

    Raises EngineError if a folder holds no weights, or if tensors are to go over the disk.
    """
    if isinstance(weights, Path):
        weights = with_head(weights, aside)
        return FromDisk(weights) if config.weight_transfer == "disk" else Broadcast(read_tensors(weights))
    if config.weight_transfer == "disk":
        raise EngineError("engine.weight_transfer is disk: give a folder, not tensors")
    return Broadcast(weights)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model folder by name. Raises EngineError if there are none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        else:
            files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"the weights in {folder} cannot be read ({error})") from error
    if not tensors:
        raise EngineError(f"{folder} holds no weights")
    return tensors
