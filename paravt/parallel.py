"""The processes of one training, through accelerate.

A step belongs to all of them. Its samples are dealt out in a fixed order (process r of W takes numbers r,
r + W, ...), counts are added up before the loss is formed, and gradients are summed: the loss is that of one
process. What follows from a step (metrics, counts, whether it is finite) is therefore equal in all of them,
and only the first one writes.

Each pass through the model is a collective act where weights are split or gradients are summed. A process
with fewer micro-batches than the others takes part with empty ones.

accelerate splits weights (FSDP2) on GPUs only. On CPUs the same code runs over gloo once it is told to;
that is how it is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
import os
from typing import Any, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

MULTI_CPU = DistributedType.MULTI_CPU
PATIENCE = timedelta(hours=3)  # others wait while the first one starts servers, rolls out, writes
T = TypeVar("T")


def is_first() -> bool:
    """Whether this process is the one that writes; one alone is."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def tell(value: T | None = None) -> T:
    """What the first process gives, in all of them."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    return broadcast_object_list([value])[0]


class Processes:
    """This process among those of the training; one alone needs no launcher.

    `dtype` is what passes through the model run in.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.accelerator = Accelerator(
            mixed_precision="bf16" if dtype == torch.bfloat16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        state = self.accelerator.state
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and state.distributed_type == MULTI_CPU:
            # the second is copied over the first whenever a part of accelerate asks for the state
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if self.sharded and dtype != torch.float32:
            # gradients of many processes are summed in float32
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            state.fsdp_plugin.mixed_precision_policy = policy

    @property
    def index(self) -> int:
        return self.accelerator.process_index

    @property
    def count(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_first(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimiser state are split over the processes."""
        return self.accelerator.is_fsdp2

    def share(self, items: Sequence[T]) -> list[T]:
        """Those of `items` that are this process's."""
        return list(items[self.index :: self.count])

    def merge(self, parts: Sequence[Sequence[T]]) -> list[T]:
        """The inverse of `share`: what each process has of its items, in the order of all items."""
        longest = max((len(part) for part in parts), default=0)
        return [part[number] for number in range(longest) for part in parts if number < len(part)]

    def total(self, value: float) -> float:
        """The sum of `value` over all processes, in float64."""
        if self.count == 1:
            return value
        summed = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        torch.distributed.all_reduce(summed)
        return summed.item()

    def gather(self, value: T) -> list[T]:
        """The value of each process, in order, in all of them."""
        return gather_object([value]) if self.count > 1 else [value]

    def tell(self, value: T | None = None) -> T:
        """What the first process gives, in all of them."""
        return tell(value)

    def deal(self, items: Sequence[T] | None) -> list[T]:
        """This process's share of what the first process gives."""
        if self.count == 1:
            return list(items)
        parts = [list(items[index :: self.count]) for index in range(self.count)] if self.is_first else None
        received: list[Any] = [None]
        torch.distributed.scatter_object_list(received, parts, src=0)
        return received[0]

    def passes(self, module: torch.nn.Module, batches: Sequence[T]) -> Iterator[T | None]:
        """The micro-batches of this process, then None until all processes have had as many.

        Gradients of a module that is held whole are summed over the processes in the last pass alone.
        """
        most = max(self.gather(len(batches)))
        for number in range(most):
            waits = number < most - 1 and self.count > 1 and not self.sharded
            with self.accelerator.no_sync(module) if waits else nullcontext():
                yield batches[number] if number < len(batches) else None

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()
