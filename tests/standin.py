"""A stand-in for a vLLM server on loopback: the paths that the client uses, and faults on demand.

It expands image pads by the size of the PNGs that it is sent, as the real one does, and answers with one
fixed token and the end token. `faults` are taken one by one by the next generations. Weights that are sent
over a group arrive at `workers`, which have the real receiver.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
import io
from pathlib import Path
import sys
import threading
from typing import Any

from aiohttp import web
import numpy as np
from PIL import Image
import torch

from paravt.config import VLLMEngineConfig
from paravt.engines import Request, Sampling
from paravt.engines.limits import ModelFacts, PromptLimits
from paravt.engines.server import HERE, ServerPlan
from paravt.engines.vllm import VLLMEngine
from tests.tiny import VISUAL, tiny_conversation, tiny_encoder, tiny_folder

sys.path.append(str(HERE / "served"))  # as a server finds it

from receiver import WeightReceiver  # noqa: E402

WORD = 10  # the token it writes


class Worker(WeightReceiver):
    """As far as the receiver knows vLLM's worker. `fault` is called before weights are received."""

    device = "cpu"

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.weights: dict[str, torch.Tensor] = {}
        self.joined = 0
        self.fault: Callable[[], Any] = lambda: None

    def paravt_join(self, **arguments: Any) -> dict[str, Any]:
        self.joined += 1
        return super().paravt_join(**arguments)

    def paravt_receive(self, **arguments: Any) -> dict[str, Any]:
        return self.fault() or super().paravt_receive(**arguments)

    def reload_weights(self, weights_iterator) -> None:
        self.weights = dict(weights_iterator)


class StandIn:
    """Use as a context manager; `url` is where it listens. `calls` are the paths asked for, in order."""

    def __init__(self, facts: ModelFacts, end_id: int, key: str = "secret") -> None:
        self.facts, self.end_id, self.key = facts, end_id, key
        self.name = f"paravt-{facts.fingerprint}"
        self.room = 100_000
        self.label = "default"
        self.folder: str | None = None
        self.workers = [Worker()]
        self.raw_logprobs = False
        self.faults: list[Callable[[dict[str, Any]], Any]] = []
        self.broken: dict[str, int] = {}  # path -> status
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> StandIn:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if status := self.broken.get(request.path):
            return web.json_response({"error": {"message": f"broken {request.path}"}}, status=status)
        if request.path == "/inference/v1/generate":
            return await self._generate(request)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.name, "max_model_len": self.room}]})
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if request.path == "/update_weight_version":
            self.label = (await request.json())["new_version"]
        if request.path == "/collective_rpc":
            return await self._rpc(await request.json())
        if request.path == "/get_world_size":
            return web.json_response({"world_size": len(self.workers)})
        return web.json_response({"success": True})

    async def _rpc(self, order: dict[str, Any]) -> web.StreamResponse:
        method, arguments = order["method"], order["kwargs"]
        if method == "reload_weights":
            self.folder = arguments["weights_path"]
            return web.json_response({"results": [None]})
        calls = [asyncio.to_thread(getattr(worker, method), **arguments) for worker in self.workers]
        return web.json_response({"results": await asyncio.gather(*calls)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = self.answer(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            found = fault(answer)
            if asyncio.iscoroutine(found):
                found = await found
            if found == "drop":
                request.transport.close()
            if isinstance(found, int):
                return web.json_response({"error": {"message": "on demand"}}, status=found)
        return web.json_response(answer)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        images = [decode(part["url"]) for part in body.get("content_parts", [])]
        prompt: list[int] = []
        for token in body["token_ids"]:
            count = 1
            if token == self.facts.image_pad_id:
                height, width = images.pop(0).shape[:2]
                count = height * width // 1024
            prompt += [token] * count
        forced = [int(token) for token, bias in body["sampling_params"]["logit_bias"].items() if bias > 0]
        ids = forced or [WORD, self.end_id]
        value = 0.0 if forced and not self.raw_logprobs else -1.5
        choice = {
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token, "logprob": value} for token in ids]},
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        count = body["sampling_params"]["n"]
        return {"prompt_token_ids": prompt, "choices": [choice | {"index": i} for i in range(count)]}


@contextmanager
def connected(log_folder: Path, **config: Any) -> Iterator[VLLMEngine]:
    """A client of the servers that the environment names, with little patience."""
    options = VLLMEngineConfig(**{"retries": 2, "request_timeout_s": 5.0} | config)
    limits = PromptLimits(images=4, context=2000)
    plan = ServerPlan(options, tiny_folder(), ModelFacts.of(tiny_folder()), limits, VISUAL)
    engine = VLLMEngine(plan, tiny_encoder().end_ids, log_folder)
    try:
        yield engine
    finally:
        engine.close()


def ask(seconds: Sequence[float] = (0.0, 1.0), size: tuple[int, int] = (32, 64), **sampling: Any) -> Request:
    """A prompt with a frame at each of `seconds`."""
    conversation = tiny_conversation(list(seconds), size=size)
    options = {"temperature": 1.0, "max_new_tokens": 12, "seed": 2**63 - 1} | sampling
    return Request(tuple(conversation.ids), tuple(conversation.visuals), Sampling(**options))


def decode(url: str) -> np.ndarray:
    """The pixels of a PNG data URL."""
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
