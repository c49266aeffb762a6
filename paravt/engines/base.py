"""Who generates: the protocol that every engine speaks.

A request is token ids with their frames; a generation is sampled ids with their log-probs under the very
distribution that was sampled from (temperature applied, no truncation of the support). Engines never see
text, and never tokenise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paravt.conversation import Visual


@dataclass(frozen=True)
class Sampling:
    """How to sample. Temperature 0 is greedy; its log-probs are those of temperature 1.

    `seed` and the sample's index in the request decide the draw alone: the same request gives the same
    tokens in any batch. There is no top-p or top-k: the trainer's support is the whole vocabulary, and an
    engine that truncates it would bias each importance ratio.
    """

    temperature: float
    max_new_tokens: int
    seed: int = 0
    n: int = 1


@dataclass(frozen=True)
class Request:
    """One prompt, asked for `sampling.n` continuations. `ids` hold image pads expanded, one run a frame."""

    ids: tuple[int, ...]
    visuals: tuple[Visual, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Generation:
    """One continuation. `ids` hold the closing token if the model wrote it; each id has its log-prob.

    `finish_reason` is the engine's own word: "stop" (the model ended its turn) or "length" (the token limit).
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int = 0
    seconds: float = 0.0
    text: str | None = field(default=None, compare=False)


class EngineError(RuntimeError):
    """A request that the engine could not serve; the message says which and why.

    `request` is its position in the call, None if the whole call failed. With a position, nothing of the call
    was done, and the other requests may be asked again.
    """

    def __init__(self, message: str, request: int | None = None) -> None:
        super().__init__(message)
        self.request = request


def refusal(request: Request, image_pad_id: int, vocabulary: int, context: int) -> str | None:
    """Why no engine can serve a request, None if it can; `context` is in tokens."""
    sampling = request.sampling
    pads = request.ids.count(image_pad_id)
    needed = sum(visual.token_count for visual in request.visuals)
    if not request.ids:
        return "it has no prompt tokens"
    if pads != needed:
        return f"{pads} image pads stand in its tokens, but its frames need {needed}"
    if not 0 <= min(request.ids) <= max(request.ids) < vocabulary:
        return f"a token id is outside the vocabulary of {vocabulary}"
    if len(request.ids) >= context:
        return f"its {len(request.ids)} tokens fill the context of {context}"
    if sampling.n < 1 or sampling.max_new_tokens < 1 or sampling.temperature < 0:
        return "n and max_new_tokens must be at least 1, temperature at least 0"
    return None


class Refused(EngineError):
    """The server understood the request and will not serve it."""


class Engine(Protocol):
    """`generate` answers requests in order: one list of `sampling.n` generations per request.

    `counts` says how often something had to be tried again, by reason. An engine whose `takes_tensors` is
    true has `load_tensors(tensors, version)` too, so that no folder need be written for it.
    """

    counts: Counter[str]

    def generate(self, requests: list[Request]) -> list[list[Generation]]: ...

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]: ...

    def load_weights(self, folder: str, version: int) -> None: ...
