"""What a vLLM worker is given beside its own methods: to take weights that a trainer sends over a group.

`--worker-extension-cls receiver.WeightReceiver` adds these methods to each worker of a server;
`/collective_rpc` calls them. Weights have the names and shapes of a checkpoint, and are loaded as from one:
each worker takes its part of what arrives, and packed copies are made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ProcessGroup
from transfer_group import Kind, broadcast, join_group


class WeightReceiver:
    """Mixed into vLLM's worker, which has `rank`, `device` and `reload_weights`."""

    _paravt_group: ProcessGroup | None = None

    def paravt_join(self, kind: Kind, host: str, port: int, size: int, timeout_s: float) -> None:
        """Join a trainer's group; a former one is left."""
        self._paravt_group = None
        self._paravt_group = join_group(kind, host, port, self.rank + 1, size, timeout_s)
        self._paravt_kind = kind

    def paravt_receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, int]:
        """Take the weights that are named, in their order, and load them. Returns how many came."""
        group, arrived = self._paravt_group, 0
        if group is None:
            raise RuntimeError("this server is in no group with a trainer")

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal arrived
            device = self.device if self._paravt_kind == "nccl" else "cpu"
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
                broadcast(group, tensor)
                arrived += 1
                yield name, tensor

        try:
            self.reload_weights(weights_iterator=arriving())
        except BaseException:
            self._paravt_group = None
            group.abort()  # else the trainer would send on, and wait
            raise
        return {"arrived": arrived}
