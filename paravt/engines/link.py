"""This process's end of the group over which one server's workers are sent weights (`served/transfer_group`).

    open    the workers join through `/collective_rpc`, this process in a thread, both at the same time
    send    the workers receive through `/collective_rpc`, this process sends in a thread

What fails on either side ends as Lost, with the workers' words if they have any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
import socket
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from paravt.engines.backend import Backend
from paravt.engines.base import EngineError
from paravt.engines.exchange import Lost

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Result = TypeVar("Result")

WORDS_S = 5.0  # a server that failed says so within that


class Link:
    """Process 0 of a group with the workers of one server; of no use any more once something has failed.

    What sends is in threads of its own, for which nothing waits when it is not needed: a wait in a group has
    a limit, but cannot be broken off.
    """

    def __init__(self, kind: str, group: Any, workers: int) -> None:
        self._kind, self._group, self._workers = kind, group, workers

    @classmethod
    async def open(cls, server: Backend) -> Link:
        """A group with `server`, as the configuration says."""
        from paravt.engines.served.transfer_group import join_group

        config = server.plan.config
        kind, host = config.weight_transfer, config.transfer_host
        device = _device(kind)
        workers = int((await server.call("GET", "/get_world_size"))["world_size"])
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise EngineError(f"cannot listen on engine.transfer_host {host!r}: {error}") from error
        place = {"kind": kind, "host": host, "port": listener.getsockname()[1], "size": workers + 1}

        def join() -> Any:
            return join_group(**place, rank=0, device=device, listener=listener.detach())

        _, group = await _together(server.rpc("paravt_join", **place), _in_thread(join))
        return cls(kind, group, workers)

    async def send(self, server: Backend, tensors: Tensors) -> None:
        """Send all of `tensors`, and wait until the workers have loaded them."""
        facts = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        given_up = threading.Event()
        sending = _in_thread(lambda: self._broadcast(tensors, given_up))
        try:
            answers, _ = await _together(server.rpc("paravt_receive", **facts), sending)
        except BaseException:
            given_up.set()
            raise
        if answers != [{"arrived": len(tensors)}] * self._workers:
            raise EngineError(f"{server.url} was sent {len(tensors)} weights and reports {answers}")

    def _broadcast(self, tensors: Tensors, given_up: threading.Event) -> None:
        import torch

        from paravt.engines.served.transfer_group import broadcast

        device = _device(self._kind)
        group, self._group = self._group, None  # let go of if anything happens, so that the workers notice
        # a stream of its own: training neither waits for it nor is waited for
        stream = torch.cuda.Stream(device) if self._kind == "nccl" else None
        try:
            with torch.cuda.stream(stream):
                for tensor in tensors.values():
                    if given_up.is_set():
                        raise RuntimeError("the server has failed")
                    broadcast(group, tensor.detach().to(device).contiguous())
        except BaseException:
            if self._kind == "nccl":
                group.abort()  # else its kernels wait on
            raise
        self._group = group


def _device(kind: str) -> str:
    """Where tensors must lie to be sent: the process that sends is the first of its machine.

    Raises EngineError for nccl without a GPU.
    """
    if kind == "gloo":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise EngineError(
            "engine.weight_transfer is nccl, but no GPU is here; write gloo, or disk where trainer and "
            "servers see the same folders"
        )
    return "cuda:0"


async def _together(
    theirs: Coroutine[Any, Any, list[dict[str, Any]]], ours: asyncio.Future[Result]
) -> tuple[list[dict[str, Any]], Result]:
    """The answers of a server's workers and what our side of the same act returns.

    Where one side fails the other is left alone, but for the server's words, which say most. Raises Lost,
    or EngineError for what the workers refuse.
    """
    asking = asyncio.ensure_future(_answers(theirs))
    try:
        await asyncio.wait({asking, ours}, return_when=asyncio.FIRST_EXCEPTION)
        if not asking.done():
            await asyncio.wait({asking}, timeout=WORDS_S)
        if asking.done():
            answers = asking.result()
            return answers, await ours
        return [], ours.result()
    except RuntimeError as error:
        if isinstance(error, EngineError):
            raise
        # torch's, for whatever happens to a group
        words = str(error).partition("\n")[0][:200]
        raise Lost("transfer broken", f"the weights did not get through ({words})") from error
    finally:
        asking.cancel()


async def _answers(theirs: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    answers = await theirs
    for answer in answers:
        if "refused" in answer:
            raise EngineError(answer["refused"])
    if errors := dict.fromkeys(answer["error"] for answer in answers if "error" in answer):
        raise Lost("transfer broken", f"the workers say: {'; '.join(errors)}")
    return answers


def _in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """`work` in a thread that keeps neither the loop nor the process from its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody looks

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            how(value)

    def run() -> None:
        try:
            told = future.set_result, work()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group
            told = future.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *told)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
