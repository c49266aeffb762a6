"""One vLLM server as its client sees it: what it serves, what weights it has, whether it is alive.

Loading weights: pause, load, label, empty the caches, resume, read the label back. While a server loads, it
carries a label that no answer may have, so that a load that fails half way leaves nothing to sample from.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
import json
import logging
import random
from typing import Any, Protocol

import aiohttp

from paravt.engines.base import EngineError, Refused
from paravt.engines.exchange import Lost, exchange, parsed, pause_s, said
from paravt.engines.server import KEY, URLS, ServerPlan, VLLMServer

log = logging.getLogger("paravt")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
CONTROL_TIMEOUT_S = 60.0  # of a control request; loading weights has the limit of a generation
MOST_RESTARTS = 3
FRESH, LOADING = "default", "loading"  # vLLM's label before any was set; ours while weights are loaded
GENERATE = "/inference/v1/generate"


class Shipment(Protocol):
    """The weights of one version, ready to be delivered to any server, again if need be."""

    async def deliver(self, server: Backend) -> None:
        """Returns when the server has loaded them. Raises Lost where it may be tried again."""


@dataclass(eq=False)
class Backend:
    """One server; `process` if it is our own, `counts` and `jitter` are those of the engine.

    `link` is the shipments' own: what one leaves for the next, of no use to a server that was started again.
    """

    url: str
    plan: ServerPlan
    http: aiohttp.ClientSession
    counts: Counter[str]
    jitter: random.Random
    process: VLLMServer | None = None
    link: Any = None
    in_flight: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.plan.config.max_in_flight)
        self._reviving = asyncio.Lock()

    async def generate(self, content: bytes) -> dict[str, Any]:
        return await self.call("POST", GENERATE, content, self.plan.config.request_timeout_s)

    async def check_identity(self) -> None:
        """Raises EngineError unless the server serves this model with room for its prompts."""
        served = (await self.call("GET", "/v1/models"))["data"]
        names = [model["id"] for model in served]
        plan = self.plan
        if plan.name not in names:
            raise EngineError(
                f"{self.url} serves {', '.join(names)}, not {plan.name}: another model than {plan.folder}; "
                f"start it with `paravt serve {plan.folder}`"
            )
        room = served[names.index(plan.name)].get("max_model_len")
        if room is not None and room < plan.context:
            raise EngineError(
                f"{self.url} holds {room} tokens a prompt, but the configuration needs {plan.context}; start "
                "it with the present parameters"
            )

    async def sync(self, weights: Shipment, label: str) -> None:
        """Load `weights` under `label`, again if the server was lost on the way."""
        retries = self.plan.config.retries
        for attempt in range(retries + 1):
            try:
                await self._sync_once(weights, label)
                return
            except Lost as error:
                self.counts[f"weights: {error.reason}"] += 1
                if attempt == retries:
                    raise EngineError(str(error)) from error
                log.warning("weights are loaded again: %s", error)
                await self.back_off(attempt)
                await self._bring_back()

    async def _sync_once(self, weights: Shipment, label: str) -> None:
        session, limit_s = label.rpartition("-")[0], self.plan.config.request_timeout_s
        await self.call("POST", "/pause?mode=wait&clear_cache=true", timeout_s=limit_s)
        try:
            await self._say(f"{session}-{LOADING}")
            await weights.deliver(self)
            for cache in ("prefix", "mm", "encoder"):
                done = await self.call("POST", f"/reset_{cache}_cache")
                if done.get("success") is False:
                    raise Lost("cache not emptied", f"{self.url} still holds its {cache} cache")
            await self._say(label)
        finally:
            await self.call("POST", "/resume")
        if (told := await self.label()) != label:
            raise EngineError(f"{self.url} says that it has weights {told!r}, not {label!r}")

    async def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """What each of the server's workers returns from `method`."""
        content = json.dumps({"method": method, "kwargs": arguments}).encode()
        answer = await self.call("POST", "/collective_rpc", content, self.plan.config.request_timeout_s)
        return answer.get("results", [])

    async def label(self) -> str:
        """What the server calls its weights."""
        return (await self.call("GET", "/weight_info"))["weight_version"]

    async def _say(self, label: str) -> None:
        await self.call("POST", "/update_weight_version", json.dumps({"new_version": label}).encode())

    async def revive(self, weights: Shipment, label: str) -> None:
        """After a failure: bring the server back with its weights, if it needs either."""
        async with self._reviving:
            await self._bring_back()
            try:
                told = await self.label()
            except Lost:
                return  # the next try says so
            if told in (FRESH, f"{label.rpartition('-')[0]}-{LOADING}"):
                self.counts["weights loaded anew"] += 1
                await self.sync(weights, label)

    async def _bring_back(self) -> None:
        """Start an own server again if it is dead, or if it says that its engine is."""
        if self.process is None:
            return
        if self.process.alive:
            try:
                await self.call("GET", "/health")
                return
            except Lost as error:
                if error.reason == "timeout":
                    return  # busy
        if self.restarts == MOST_RESTARTS:
            words = f"the vLLM server at {self.url} died {MOST_RESTARTS + 1} times"
            raise EngineError(f"{words}: {self.process.failure()}")
        self.restarts += 1
        self.counts["server restarted"] += 1
        log.warning("the vLLM server at %s is dead and is started again", self.url)
        self.link = None
        await asyncio.to_thread(self.process.restart)
        await asyncio.to_thread(self.process.wait_ready)

    async def back_off(self, attempt: int) -> None:
        """Wait before the next try."""
        await asyncio.sleep(pause_s(attempt, FIRST_WAIT_S, LONGEST_WAIT_S, self.jitter))

    async def call(
        self, method: str, path: str, content: bytes | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """The JSON object that comes back, {} for an empty answer.

        Raises Lost where the same may be tried again, Refused for a request that is wrong, EngineError for a
        server that is.
        """
        headers = {"Content-Type": "application/json"} if content is not None else {}
        status, text = await exchange(
            self.http, method, self.url + path, timeout_s, data=content, headers=headers
        )
        if status in (401, 403):
            raise EngineError(f"{self.url} refuses the key; put the key of that server into {KEY}")
        if status == 404:
            raise EngineError(
                f"{self.url} does not know {path.partition('?')[0]} or the model: {said(text)}; {URLS} must "
                "name servers that `paravt serve` started"
            )
        if status >= 300:
            raise Refused(f"{self.url} refuses it ({status}): {said(text)}")
        data = parsed(self.url + path, text) if text else {}
        return data if isinstance(data, dict) else {}
