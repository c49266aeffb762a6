"""The group of processes over which weights travel: a trainer's process is 0, a server's workers follow.

    gloo   through the memory of the hosts; any machine, also a GPU that trainer and server share
    nccl   from GPU to GPU; each process has one of its own

The group is torch's own, made beside whatever group a process is in already. Both sides use this one module:
the trainer imports it, the server finds it on its path. They meet at a store that the trainer opens, on the
one address that it names; it stays open as long as the group.

No wait in a group is longer than STALL_S. A process that meets an error lets go of the group, and with it of
its connections, so that the others meet one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
import os
import socket
import time
from typing import Literal

import torch
from torch import distributed

Kind = Literal["gloo", "nccl"]
STALL_S = 60.0  # for all to come, and for any one tensor
POLL_S = 2e-4
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def join_group(
    kind: Kind, host: str, port: int, rank: int, size: int, device: str, listener: int | None = None
) -> distributed.ProcessGroup:
    """The group, once all its processes have come and can be reached.

    `device` is where this process's tensors will lie. `listener` is the descriptor of process 0's listening
    socket at `host` and `port`, which the store takes over. Raises RuntimeError if not all come in time.
    """
    limit = timedelta(seconds=STALL_S)
    store = distributed.TCPStore(
        host,
        port,
        size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    if kind == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _errors_are_ours():
            group = distributed.ProcessGroupNCCL(store, rank, size, options)
    else:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = limit
        own = host if rank == 0 else _address_towards(host, port)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
        group = distributed.ProcessGroupGloo(store, rank, size, options)
    broadcast(group, torch.zeros(1, device=device))
    return group


def broadcast(group: distributed.ProcessGroup, tensor: torch.Tensor) -> None:
    """Give process 0's tensor to the others; it must be contiguous, with the same shape everywhere.

    It has arrived on return. Raises RuntimeError if the others are gone, or take longer than STALL_S.
    """
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=STALL_S)
    work = group.broadcast([tensor], options)
    deadline = time.monotonic() + STALL_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the others have not taken part for {STALL_S:g} s")
        time.sleep(POLL_S)
    work.wait()  # raises what went wrong


def _address_towards(host: str, port: int) -> str:
    """This machine's address as `host` sees it; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """A group of NCCL that is made within it does not end its process when something goes wrong in it."""
    before = os.environ.get(HANDLING)
    os.environ[HANDLING] = "0"
    try:
        yield
    finally:
        os.environ.pop(HANDLING)
        if before is not None:
            os.environ[HANDLING] = before
