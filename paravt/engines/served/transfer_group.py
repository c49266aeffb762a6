"""The group of processes over which weights travel: a trainer's process is 0, a server's workers follow.

    gloo   through the memory of the hosts; any machine, also a GPU that trainer and server share
    nccl   from GPU to GPU; each process has one of its own

The group is torch's own, made beside whatever group a process is in already. Both sides use this one module:
the trainer imports it, the server finds it on its path. They meet at a store that the trainer opens, on the
one address that it names.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
from torch import distributed

Kind = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=60)


def join_group(
    kind: Kind, host: str, port: int, rank: int, size: int, timeout_s: float, listener: int | None = None
) -> distributed.ProcessGroup:
    """The group, once all its processes have come; each later wait in it has the limit `timeout_s`.

    `listener` is the descriptor of process 0's listening socket at `host` and `port`, which the store takes
    over. Raises RuntimeError if not all have come within a minute.
    """
    store = distributed.TCPStore(
        host,
        port,
        size,
        is_master=rank == 0,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    timeout = timedelta(seconds=timeout_s)
    if kind == "nccl":  # connects when it is used first
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = JOIN_TIMEOUT
    # beyond loopback GLOO_SOCKET_IFNAME names the interface, as for any group of torch
    device = gloo.create_device(hostname=LOOPBACK) if host == LOOPBACK else gloo.create_default_device()
    options._devices = [device]
    group = gloo(store, rank, size, options)
    group.set_timeout(timeout)
    return group


def broadcast(group: distributed.ProcessGroup, tensor: torch.Tensor) -> None:
    """Give process 0's tensor to the others; it must be contiguous, with the same shape everywhere.

    With gloo it is there on return; with nccl, for what comes next on the current stream.
    """
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
