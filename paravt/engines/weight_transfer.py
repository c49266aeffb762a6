"""The ways in which a server gets new weights (`engine.weight_transfer`).

    disk         the server reads a model folder that both sides see
    gloo, nccl   this process sends each tensor to the server's workers, over a group of their own
                 (`served/transfer_group.py`); no folder is shared, and none need be written

Whatever happens on the way ends as Lost: the group is given up, the next try makes another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
import socket
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paravt.config import VLLMEngineConfig
from paravt.engines.backend import Backend, Lost
from paravt.engines.base import EngineError
from paravt.engines.tied import with_head

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
First, Second = TypeVar("First"), TypeVar("Second")


class Shipment(Protocol):
    """The weights of one version, ready to be delivered to any server, again if need be."""

    async def deliver(self, server: Backend) -> None:
        """Returns when the server has loaded them. Raises Lost where it may be tried again."""


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
        link, server.link = server.link, None  # it comes back if it holds
        link = link or await Link.open(server)
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
    """The tensors of a model folder by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for path in files for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights in {folder} cannot be read ({error})") from error


class Link:
    """Process 0 of a group with the workers of one server."""

    def __init__(self, group: Any, device: str, workers: int) -> None:
        self._group, self._device, self._workers = group, device, workers

    @classmethod
    async def open(cls, server: Backend) -> Link:
        """A group with `server`, as the configuration says."""
        import torch

        from paravt.engines.served.transfer_group import join_group

        config = server.plan.config
        kind, host = config.weight_transfer, config.transfer_host
        if kind == "nccl" and not torch.cuda.is_available():
            raise EngineError(
                "engine.weight_transfer is nccl, but no GPU is here; write gloo, or disk where trainer and "
                "servers see the same folders"
            )
        workers = int((await server.call("GET", "/get_world_size"))["world_size"])
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise EngineError(f"cannot listen on engine.transfer_host {host!r}: {error}") from error
        place = {"kind": kind, "host": host, "port": listener.getsockname()[1], "size": workers + 1}
        place["timeout_s"] = config.request_timeout_s
        joining = asyncio.to_thread(join_group, **place, rank=0, listener=listener.detach())
        _, group = await _both(server.rpc("paravt_join", **place), _as_lost(joining))
        return cls(group, "cuda" if kind == "nccl" else "cpu", workers)

    async def send(self, server: Backend, tensors: Tensors) -> None:
        """Send all of `tensors`, and wait until the workers have loaded them."""
        facts = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        received = server.rpc("paravt_receive", **facts)
        sending = asyncio.to_thread(self._broadcast, tensors)
        answer, _ = await _both(received, _as_lost(sending), self._group.abort)
        if answer != [{"arrived": len(tensors)}] * self._workers:
            raise EngineError(f"{server.url} was sent {len(tensors)} weights and reports {answer}")

    def _broadcast(self, tensors: Tensors) -> None:
        import torch

        from paravt.engines.served.transfer_group import broadcast

        for tensor in tensors.values():
            broadcast(self._group, tensor.detach().to(self._device).contiguous())
        if self._device == "cuda":
            torch.cuda.synchronize()


async def _both(
    theirs: Coroutine[Any, Any, First],
    ours: Coroutine[Any, Any, Second],
    give_up: Callable[[], None] = lambda: None,
) -> tuple[First, Second]:
    """What both return. If one fails, or if nobody waits any more, `give_up` is to end the other."""
    tasks = asyncio.ensure_future(theirs), asyncio.ensure_future(ours)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if not all(task.done() for task in tasks):
            give_up()
        # the server's words come first: they say more
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
    except asyncio.CancelledError:
        give_up()
        tasks[0].cancel()
        raise
    return tasks[0].result(), tasks[1].result()


async def _as_lost(ours: Coroutine[Any, Any, Second]) -> Second:
    try:
        return await ours
    except RuntimeError as error:  # torch's, for whatever happens to a group
        raise Lost("transfer broken", f"the weights did not get through ({_first_line(error)})") from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:200]
