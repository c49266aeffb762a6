"""What a vLLM worker is given beside its own methods: to take weights that a trainer sends over a group.

`--worker-extension-cls receiver.WeightReceiver` adds these methods to each worker of a server;
`/collective_rpc` calls them. Weights have the names and shapes of a checkpoint, and are loaded as from one:
each worker takes its part of what arrives, and packed copies are made anew.

All weights arrive before the first is loaded: a reload that vLLM begins and does not end leaves a model of
which a part is gone. Each worker answers each call, with an error if need be: vLLM loses count of the answers
of its workers when one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from transfer_group import Kind, broadcast, join_group

Shapes = dict[str, tuple[int, ...]]


class WeightReceiver:
    """Mixed into vLLM's worker, which has `rank`, `device` and `reload_weights`.

    Methods answer {"error": words} for what may work another time, {"refused": words} for what will not.
    """

    _paravt_group: ProcessGroup | None = None
    _paravt_device: Any = "cpu"
    _paravt_shapes: Shapes | None = None  # of the weights that were loaded first

    def paravt_join(self, kind: Kind, host: str, port: int, size: int) -> dict[str, Any]:
        """Join a trainer's group; a former one is left."""
        self._paravt_group = None
        self._paravt_device = self.device if kind == "nccl" else "cpu"

        def join() -> dict[str, Any]:
            device = str(self._paravt_device)
            self._paravt_group = join_group(kind, host, port, self.rank + 1, size, device)
            return {}

        return _answer(join)

    def paravt_receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Take the weights that are named, in their order, and load them. Answers how many came."""
        wanted = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
        if self._paravt_shapes not in (None, wanted):
            # the trainer sends, and is told by the closed connection
            self._paravt_group = None
            return {"refused": _difference(wanted, self._paravt_shapes)}

        def receive() -> dict[str, Any]:
            group, self._paravt_group = self._paravt_group, None  # it is let go of if anything happens
            if group is None:
                raise RuntimeError("this server is in no group with a trainer")
            arrived: dict[str, torch.Tensor] = {}
            for name, dtype in zip(names, dtypes, strict=True):
                place = torch.empty(wanted[name], dtype=getattr(torch, dtype), device=self._paravt_device)
                broadcast(group, place)
                arrived[name] = place.cpu()
            self.reload_weights(weights_iterator=iter(arrived.items()))
            self._paravt_group, self._paravt_shapes = group, wanted
            return {"arrived": len(arrived)}

        return _answer(receive)


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}


def _difference(wanted: Shapes, first: Shapes) -> str:
    """What sets two lists of weights apart, by one example of each kind."""
    both = wanted.keys() & first.keys()
    kinds = {
        "is not among": sorted(wanted.keys() - first.keys()),
        "is missing from": sorted(first.keys() - wanted.keys()),
        "has another shape than among": sorted(name for name in both if wanted[name] != first[name]),
    }
    words = [f"{names[0]} (of {len(names)}) {what} those" for what, names in kinds.items() if names]
    return f"{'; '.join(words)} that were loaded first"
