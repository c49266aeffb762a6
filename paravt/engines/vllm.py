"""The Engine protocol over one or more vLLM servers: token ids in, token ids with log-probs out.

    choose     the server that has seen the prompt's beginning, unless it is busier than the others
    send       all requests of a call at once; each has a time limit
    try again  after a timeout, a lost connection or an error of the server, later and later, with jitter
    check      the prompt that the server read, the ids and log-probs, the weights that were sampled with

Weights go over the disk or a group of processes (`weight_transfer`): pause, load, label, empty the caches,
resume, read the label back. A label is this engine's own (`3f9c01aa-12`), so that weights of another trainer,
of a restarted server or of an earlier step are told from ours in every single answer. While servers load they
carry a label that no answer may have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine
import json
import logging
import math
from pathlib import Path
import random
import secrets
import shutil
import threading
import time
from typing import Any, TypeVar

import aiohttp
import numpy as np

from paravt.chat import PATCH
from paravt.conversation import MERGE, Visual
from paravt.engines.backend import LOADING, Backend, Shipment
from paravt.engines.base import EngineError, Generation, Refused, Request, Sampling, refusal
from paravt.engines.exchange import Lost
from paravt.engines.link import Tensors
from paravt.engines.server import ServerPlan, VLLMServer, api_key, given_urls
from paravt.engines.weight_transfer import shipment
from paravt.engines.wire import FrameUrls, Sample, Unfinished, read_answer, request_body

log = logging.getLogger("paravt")

Result = TypeVar("Result")

AFFINITY_TOKENS = 256  # a prompt's beginning that decides its server
SLACK = 1.25  # of the mean load, before a busier server is passed over
FORCED = 100.0  # the strongest logit bias that vLLM takes
CLOSE_S = 10.0


class VLLMEngine:
    """Servers named by the environment, or started here and ended by `close`.

    `end_ids` end a turn; logs of own servers go to `log_folder`. `counts` says how often something was tried
    again, by reason. Raises EngineError if a server does not start, serves another model, refuses the key,
    changes frames or reports other log-probs than those of the sampling distribution. Calls may come from
    several threads.
    """

    def __init__(self, plan: ServerPlan, end_ids: Collection[int], log_folder: str | Path) -> None:
        self.plan = plan
        self.end_ids = sorted(end_ids)
        self.weight_version = 0
        self.counts: Counter[str] = Counter()
        self._session_id = secrets.token_hex(4)
        self.takes_tensors = plan.config.weight_transfer != "disk"
        self._shipment: Shipment | None = None
        self._aside = Path(log_folder) / f"tied-{self._session_id}"
        self._broken: str | None = None
        self._urls = FrameUrls()
        self._jitter = random.Random()  # its own: the draws of training are not moved by a retry
        self._servers: list[VLLMServer] = []
        self._backends: list[Backend] = []
        self._http: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        try:
            self._open(Path(log_folder))
        except BaseException:
            self.close()
            raise

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        """Answer `requests` in order. Raises EngineError, before any work, for one that cannot be served."""
        return self._wait(self._generate(requests))

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        future = asyncio.run_coroutine_threadsafe(self._generate(requests), self._loop)
        return await asyncio.wrap_future(future)

    def load_weights(self, folder: str, version: int) -> None:
        """Give all servers the weights of a model folder; over the disk it must be one that they can read.

        Returns when each has them, says so, and has forgotten what it computed with the old ones. Requests
        that were on their way are finished with the old ones first. If it raises EngineError, nothing is
        generated until a later load has worked.
        """
        self._wait(self._load(Path(folder).resolve(), version))

    def load_tensors(self, tensors: Tensors, version: int) -> None:
        """As `load_weights`, of tensors by their names in a model folder, if the engine `takes_tensors`.

        They are kept, for a server that is started again, until the next load: they must not change.
        """
        self._wait(self._load(tensors, version))

    def close(self) -> None:
        """End own servers and the client. May be called twice."""
        for backend in self._backends:
            backend.link = None
        for server in self._servers:
            server.stop()
        shutil.rmtree(self._aside, ignore_errors=True)
        if not self._thread.is_alive():
            return
        if self._http:
            asyncio.run_coroutine_threadsafe(self._http.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()
        if self.counts:
            log.warning("vLLM: %s", ", ".join(f"{n} x {what}" for what, n in sorted(self.counts.items())))

    def _open(self, log_folder: Path) -> None:
        urls = given_urls()
        key = api_key(required=bool(urls))
        for index in range(0 if urls else self.plan.config.servers):
            self._servers.append(VLLMServer(self.plan, key, log_folder, index))
        for server in self._servers:
            server.wait_ready()
        self._wait(self._connect(urls, key))

    async def _connect(self, urls: list[str], key: str) -> None:
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0)
        )
        for url, server in [(url, None) for url in urls] + [(server.url, server) for server in self._servers]:
            backend = Backend(url, self.plan, self._http, self.counts, self._jitter, server)
            self._backends.append(backend)
        await asyncio.gather(*(backend.check_identity() for backend in self._backends))
        await self._load(self.plan.folder.resolve(), 0)
        await asyncio.gather(*(self._probe(backend) for backend in self._backends))

    async def _probe(self, backend: Backend) -> None:
        """Ask for one token that is forced: the server must read our frames as they are, and report the
        log-prob after the logits were changed, which is then 0.
        """
        visual, facts = self.plan.visual, self.plan.facts
        unit = PATCH * MERGE
        low = max(1, math.ceil(math.sqrt(visual.min_pixels) / unit))
        sides = {low, max(low, math.isqrt(visual.max_pixels) // unit)}
        noise = np.random.default_rng(0)
        frames, ids = [], []
        for side in sorted(sides)[-self.plan.limits.images :]:
            image = noise.integers(0, 256, (side * unit, side * unit, 3), dtype=np.uint8)
            frames.append(Visual("probe", 0.0, (1, side * MERGE, side * MERGE), image))
            ids += [facts.vision_start_id, *[facts.image_pad_id] * side**2, facts.vision_end_id]
        request = Request(tuple(ids), tuple(frames), Sampling(1.0, 1))
        body = self._body(request)
        body["sampling_params"]["logit_bias"][str(self.end_ids[0])] = FORCED
        data = await backend.generate(json.dumps(body).encode())
        [sample] = read_answer(data, request, facts.unsampled_ids, self.end_ids)
        if sample.ids != self.end_ids[:1] or sample.logprobs[0] < -1e-3:
            raise EngineError(
                f"{backend.url} reports log-prob {sample.logprobs[0]:.3f} for a token that was forced: not "
                "of the distribution that it samples from; start it with --logprobs-mode processed_logprobs"
            )

    async def _generate(self, requests: list[Request]) -> list[list[Generation]]:
        for number, request in enumerate(requests):
            if problem := self._refusal(request):
                raise EngineError(f"request {number}: {problem}", request=number)
        if self._broken:
            raise EngineError(f"the servers have no weights to sample with: {self._broken}")
        tasks = [asyncio.ensure_future(self._answer(n, request)) for n, request in enumerate(requests)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()  # closes its connection, and the server drops the request
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _refusal(self, request: Request) -> str | None:
        facts, config = self.plan.facts, self.plan.config
        if problem := refusal(request, facts.image_pad_id, facts.vocabulary, self.plan.context):
            return problem
        if len(request.visuals) > self.plan.limits.images:
            return f"{len(request.visuals)} frames, but the servers take {self.plan.limits.images} a prompt"
        if request.sampling.n > config.max_sequences:
            return f"{request.sampling.n} samples, but engine.max_sequences is {config.max_sequences}"
        if any(visual.image is None for visual in request.visuals):
            return "a frame has no pixels; decode it again first"
        return None

    async def _answer(self, number: int, request: Request) -> list[Generation]:
        started, oldest = time.perf_counter(), self.weight_version
        backend: Backend | None = None
        for attempt in range(self.plan.config.retries + 1):
            backend = self._choose(request, avoid=backend)
            try:
                samples = await self._ask(backend, request)
                versions = [self._version(backend, sample.versions, oldest) for sample in samples]
            except Refused as error:
                raise EngineError(f"request {number}: {error}", request=number) from error
            except (Lost, Unfinished) as error:
                reason = error.reason if isinstance(error, Lost) else "unfinished"
                self.counts[reason] += 1
                if attempt == self.plan.config.retries:
                    # a request that is never answered fails alone; without a server nothing can be asked
                    alone = None if reason == "connection lost" else number
                    words = f"request {number} failed {attempt + 1} times, last: {error}"
                    raise EngineError(words, request=alone) from error
                log.info("request %d is sent again: %s", number, error)
                await backend.back_off(attempt)
                await backend.revive(self._shipment, self._label)
                continue
            seconds = time.perf_counter() - started
            return [
                Generation(
                    list(sample.ids),
                    list(sample.logprobs),
                    sample.finish_reason,
                    version,
                    seconds,
                )
                for sample, version in zip(samples, versions, strict=True)
            ]
        raise AssertionError("unreachable")

    async def _ask(self, backend: Backend, request: Request) -> list[Sample]:
        backend.in_flight += 1
        try:
            async with backend.slots:
                content = await asyncio.to_thread(lambda: json.dumps(self._body(request)).encode())
                data = await backend.generate(content)
        finally:
            backend.in_flight -= 1
        try:
            return read_answer(data, request, self.plan.facts.unsampled_ids, self.end_ids)
        except Unfinished:
            raise
        except EngineError as error:
            raise EngineError(f"{backend.url}: {error}") from error

    def _choose(self, request: Request, avoid: Backend | None = None) -> Backend:
        """The server of the prompt's beginning: it may hold keys and values of it. A busy one is passed over,
        and so is the one that just failed.
        """
        candidates = [backend for backend in self._backends if backend is not avoid] or self._backends
        preferred = candidates[hash(request.ids[:AFFINITY_TOKENS]) % len(candidates)]
        mean = sum(backend.in_flight for backend in candidates) / len(candidates)
        if preferred.in_flight <= SLACK * mean + 1:
            return preferred
        return min(candidates, key=lambda backend: backend.in_flight)

    def _version(self, backend: Backend, labels: tuple[str, ...], oldest: int) -> int:
        """The version of the oldest weights of a sample. Raises EngineError unless ours and recent, Lost for
        weights that were on their way when loading them was broken off.
        """
        versions = []
        for label in labels:
            session, _, number = label.rpartition("-")
            if (session, number) == (self._session_id, LOADING):
                raise Lost("half loaded", f"{backend.url} has not got all of its weights")
            if session != self._session_id or not number.isdigit():
                raise EngineError(
                    f"{backend.url} sampled with weights {label!r}, which this run has not given it; does "
                    "another run use the same server?"
                )
            versions.append(int(number))
        if min(versions) < oldest:
            raise EngineError(
                f"{backend.url} sampled with weights of version {min(versions)}, but {oldest} was loaded"
            )
        return min(versions)

    def _body(self, request: Request) -> dict[str, Any]:
        urls = [self._urls.of(visual.image) for visual in request.visuals]
        plan = self.plan
        return request_body(request, urls, plan.name, plan.facts, self.end_ids, plan.context)

    async def _load(self, weights: Path | Tensors, version: int) -> None:
        self._broken = f"version {version} was not loaded by all of them"
        try:
            aside = self._aside / str(version)
            shipped = await asyncio.to_thread(shipment, weights, self.plan.config, aside)
            # both at once: a server may be revived meanwhile
            self._shipment, self.weight_version = shipped, version
            loads = [backend.sync(self._shipment, self._label) for backend in self._backends]
            # all come to an end before one speaks: none may still be loading when the caller goes on
            for outcome in await asyncio.gather(*loads, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        except EngineError as error:
            raise EngineError(f"the weights of version {version} did not arrive: {error}") from error
        self._broken = None
        for old in set(self._aside.glob("*")) - {aside}:
            shutil.rmtree(old)

    @property
    def _label(self) -> str:
        return f"{self._session_id}-{self.weight_version}"

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the client's loop; a Ctrl-C meanwhile takes it back."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
