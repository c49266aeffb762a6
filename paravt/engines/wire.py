"""What goes over the wire to `POST /inference/v1/generate`, and what comes back; pure functions.

    ids with pads expanded, one run a frame  ->  one pad a frame + the frames as PNG data URLs
    the server expands the pads again: the prompt that it reports must be ours, token by token

PNG is lossless and the frames have their final size, so the server's image processor has nothing to resize:
the model sees the pixels that the transformers engine would show it. Log-probs are those of the distribution
that was sampled from (temperature applied, control tokens at -100 in the logits, which is 0 in float32).
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import io
import math
import threading
from typing import Any, Literal

import numpy as np
from PIL import Image

from paravt.conversation import Visual
from paravt.engines.base import EngineError, Request
from paravt.engines.limits import ModelFacts

BAN = -100.0  # the strongest logit bias that vLLM takes
ROUNDING = 1e-3  # a log-prob may be above 0 by that much
LOWEST = -1000.0  # vLLM writes -9999 for minus infinity and for NaN


@dataclass(frozen=True)
class Sample:
    """One continuation as the server tells it. `versions` are its weight labels, oldest first."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    versions: tuple[str, ...]


class Unfinished(EngineError):
    """A continuation that the server gave up (aborted, failed): the same request may be sent again."""


def collapse(ids: Sequence[int], visuals: Sequence[Visual], image_pad_id: int) -> list[int]:
    """The ids with each frame's run of pads as one pad. Raises EngineError where run and frame differ."""
    collapsed: list[int] = []
    position = 0
    for number, visual in enumerate(visuals):
        start = ids.index(image_pad_id, position)
        end = start + visual.token_count
        if any(token != image_pad_id for token in ids[start:end]):
            raise EngineError(f"frame {number} needs {visual.token_count} image pads in a row")
        collapsed += ids[position : start + 1]
        position = end
    return collapsed + list(ids[position:])


def data_url(image: np.ndarray) -> str:
    """uint8 [H, W, 3] as a PNG data URL."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


class FrameUrls:
    """Data URLs of frames. Those used last are kept: each turn of an episode sends its frames again."""

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self.most_bytes = most_bytes
        self._held = 0
        self._urls: OrderedDict[tuple, str] = OrderedDict()
        self._guard = threading.Lock()

    def of(self, image: np.ndarray) -> str:
        key = (image.shape, hashlib.blake2b(np.ascontiguousarray(image), digest_size=16).digest())
        with self._guard:
            if key in self._urls:
                self._urls.move_to_end(key)
                return self._urls[key]
        url = data_url(image)
        with self._guard:
            if key not in self._urls:
                self._urls[key] = url
                self._held += len(url)
            while self._held > self.most_bytes:
                self._held -= len(self._urls.popitem(last=False)[1])
        return url


def request_body(
    request: Request, urls: Sequence[str], model: str, facts: ModelFacts, end_ids: Sequence[int], context: int
) -> dict[str, Any]:
    """The JSON body. Greedy requests ask for one continuation: all of them would be equal."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "token_ids": collapse(request.ids, request.visuals, facts.image_pad_id),
        "sampling_params": {
            "n": sampling.n if sampling.temperature > 0 else 1,
            "temperature": sampling.temperature,
            "seed": sampling.seed % 2**62,
            "max_tokens": min(sampling.max_new_tokens, context - len(request.ids)),
            # each is stated, so that no default of a server or a checkpoint changes the distribution
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {str(token): BAN for token in facts.unsampled_ids},
            "logprobs": 0,
            "stop_token_ids": list(end_ids),
            "detokenize": False,
        },
        "return_token_ids": True,
    }
    if urls:
        body["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
    return body


def read_answer(
    data: dict[str, Any], request: Request, unsampled_ids: Sequence[int], end_ids: Sequence[int]
) -> list[Sample]:
    """The continuations in order of their index.

    Raises Unfinished for one that the server gave up, EngineError for an answer that cannot be trusted.
    """
    try:
        prompt = data["prompt_token_ids"]
        choices = sorted(data["choices"], key=lambda choice: choice["index"])
        if prompt is None or tuple(prompt) != request.ids:
            raise EngineError(_difference(prompt or (), request.ids))
        wanted = request.sampling.n if request.sampling.temperature > 0 else 1
        if [choice["index"] for choice in choices] != list(range(wanted)):
            raise EngineError(f"{wanted} continuations were asked for, {len(choices)} came back")
        samples = [_read_choice(choice, unsampled_ids, end_ids) for choice in choices]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the server's answer is not of the kind expected ({error!r})") from error
    return samples * (request.sampling.n // wanted)


def _read_choice(choice: dict[str, Any], unsampled_ids: Sequence[int], end_ids: Sequence[int]) -> Sample:
    reason, ids = choice["finish_reason"], list(choice["token_ids"])
    if reason not in ("stop", "length"):
        raise Unfinished(f"the server ended a continuation with {reason!r}")
    logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
    if len(logprobs) != len(ids) or not ids:
        raise EngineError(f"{len(ids)} sampled ids came with {len(logprobs)} log-probs")
    if not all(math.isfinite(value) and LOWEST < value <= ROUNDING for value in logprobs):
        raise EngineError("a sampled token has no finite log-prob; do the weights hold NaN?")
    if banned := set(ids) & set(unsampled_ids):
        raise EngineError(f"the control tokens {sorted(banned)} were sampled, which no engine may do")
    if (reason == "stop") != (ids[-1] in end_ids):
        raise EngineError(f"a continuation ended by {reason!r} has {ids[-1]} as its last token")
    spans = choice["weight_versions"]
    if not spans:
        raise EngineError("the server says nothing of the weights it sampled with; vLLM 0.32 is needed")
    return Sample(ids, logprobs, reason, tuple(dict.fromkeys(span["version"] for span in spans)))


def _difference(theirs: Sequence[int], ours: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
    place = min(len(theirs), len(ours)) if place is None else place
    return (
        f"the server read another prompt than was sent: {len(theirs)} tokens instead of {len(ours)}, the "
        f"first difference at {place}; its image processor must leave frames as they are "
        "(visual.min_pixels, visual.max_pixels), and its vocabulary must be the model's"
    )
