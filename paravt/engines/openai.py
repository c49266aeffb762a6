"""Any OpenAI-compatible endpoint, for evaluation only: it speaks text, not tokens.

A request's ids are read back as chat messages: roles and turns as the chat format marks them, text decoded by
the local tokenizer, each frame's run of pads as an image (PNG data URL). What comes back is text; the local
tokenizer encodes it so that the conversation goes on. Three things are not what they are elsewhere:

    ids        say what was written, not which tokens the model sampled
    log-probs  are NaN, so that nothing can be trained on them; weights cannot be replaced
    prompt     is rendered by the server's own chat template, from the same messages

A prefix of the assistant's turn (a forced `<think>`) is sent as the beginning of its message if the endpoint
continues such messages (`prefill`, as vLLM and SGLang do), else refused: it must not be lost in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
import json
import math
import time
from typing import TYPE_CHECKING, Any

from paravt.chat import ASSISTANT, END, IMAGE_PAD, VISION_END, VISION_START
from paravt.config import EndpointConfig
from paravt.conversation import Visual
from paravt.engines.base import EngineError, Generation, Refused, Request
from paravt.engines.chat_client import ChatClient, ChatReply
from paravt.engines.exchange import Lost
from paravt.engines.wire import FrameUrls

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder

KEY = "PARAVT_ENDPOINT_KEY"
START = "<|im_start|>"


@dataclass(frozen=True)
class Chat:
    """A prompt as messages. `prefix` is what the assistant's turn begins with; no message holds it."""

    messages: list[dict[str, Any]]
    prefix: str


class OpenAIEngine:
    """The Engine protocol over chat completions. Raises EngineError if the endpoint cannot be used."""

    def __init__(self, config: EndpointConfig, encoder: ChatEncoder, key: str = "") -> None:
        self.config, self.encoder = config, encoder
        self.client = ChatClient(
            config.url, config.model, key, KEY, config.retries, config.timeout_s, config.in_flight
        )
        self._urls = FrameUrls()
        # Answers of a call in which another request failed: they are not asked (and paid) for twice.
        self._kept: dict[tuple, list[Generation] | EngineError] = {}
        self.model = asyncio.run(self._identify())

    async def _identify(self) -> str:
        async with self.client.session() as http:
            return await self.client.find_model(http)

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        return asyncio.run(self.generate_async(requests))

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        """Raises EngineError with the position of the first request that failed; the answers to the others
        are kept for the next call.
        """
        slots = asyncio.Semaphore(self.config.in_flight)
        async with self.client.session() as http:
            answers = await asyncio.gather(
                *(self._answer(request, http, slots) for request in requests), return_exceptions=True
            )
        failed = None
        for number, answer in enumerate(answers):
            if isinstance(answer, BaseException) and not isinstance(answer, Lost | Refused):
                raise answer
            if isinstance(answer, Lost) and not answer.reached:
                raise EngineError(str(answer)) from answer
            self._kept[_identity(requests[number])] = answer
            if isinstance(answer, EngineError) and failed is None:
                failed = number
        if failed is not None:
            self._kept.pop(_identity(requests[failed]))
            raise EngineError(f"request {failed}: {answers[failed]}", request=failed)
        self._kept.clear()
        return answers

    def load_weights(self, folder: str, version: int) -> None:
        raise EngineError(
            f"the weights behind {self.client.url} cannot be replaced from here: an endpoint is for "
            "evaluation only; train with engine transformers or vllm"
        )

    async def _answer(self, request: Request, http: Any, slots: asyncio.Semaphore) -> list[Generation]:
        kept = self._kept.get(_identity(request))
        if isinstance(kept, EngineError):
            raise kept
        if kept is not None:
            return kept
        chat = to_chat(request.ids, request.visuals, self.encoder, self._urls)
        sampling = request.sampling
        parameters: dict[str, Any] = {"temperature": sampling.temperature, "top_p": 1.0}
        messages = chat.messages
        if chat.prefix:
            if not self.config.prefill:
                raise EngineError(
                    f"each assistant turn begins with {chat.prefix!r}, which this endpoint is not known to "
                    "continue; write --prefill for a vLLM or SGLang server, or episode.force_think: false"
                )
            messages = [*messages, {"role": "assistant", "content": chat.prefix}]
            parameters |= {"continue_final_message": True, "add_generation_prompt": False}
        found = []
        for index in range(sampling.n):
            started = time.perf_counter()
            async with slots:
                reply = await self.client.complete(
                    http,
                    messages,
                    sampling.max_new_tokens,
                    seed=(sampling.seed + index) % 2**31,
                    **parameters,
                )
            found.append(self._generation(reply, chat.prefix, time.perf_counter() - started))
        return found

    def _generation(self, reply: ChatReply, prefix: str, seconds: float) -> Generation:
        if reply.finish_reason not in ("stop", "length", "tool_calls", "eos", "end_turn"):
            raise Refused(f"the endpoint ended the reply by {reply.finish_reason!r}")
        text = written(reply)
        if prefix and text.startswith(prefix):
            text = text[len(prefix) :]  # some servers give the beginning back
        cut = reply.finish_reason == "length"
        ids = self.encoder.tokenizer.encode(text.replace("<|", "< |"), add_special_tokens=False)
        ids += [] if cut else [self.encoder.end_id]
        if not ids:
            raise Refused("the endpoint gave nothing back within the limit of tokens")
        return Generation(ids, [math.nan] * len(ids), "length" if cut else "stop", 0, seconds, text)


def to_chat(ids: Sequence[int], visuals: Sequence[Visual], encoder: ChatEncoder, urls: FrameUrls) -> Chat:
    """The messages of a prompt: what the chat format says between `<|im_start|>role` and `<|im_end|>`.

    Raises EngineError for ids that are not of that format, or whose frames are not these.
    """
    single = encoder.tokenizer.convert_tokens_to_ids
    start, end, opened, closed = (single(token) for token in (START, END, VISION_START, VISION_END))
    frames = iter(visuals)
    messages: list[dict[str, Any]] = []
    place = 0
    ids = list(ids)
    while place < len(ids):
        if ids[place] != start:
            place += 1  # the newline between two turns
            continue
        stop = next((at for at in range(place + 1, len(ids)) if ids[at] in (end, start)), len(ids))
        role, newline, _ = encoder.tokenizer.decode(ids[place + 1 : stop]).partition("\n")
        if not newline or role not in ("system", "user", "assistant"):
            raise EngineError(f"a turn of {role[:20]!r} is no chat turn")
        parts = _parts(ids[place + 1 : stop], opened, closed, frames, encoder, urls)
        parts[0]["text"] = parts[0]["text"].removeprefix(f"{role}\n")
        content = [part for part in parts if part.get("text") != ""]
        if stop == len(ids):
            if role != "assistant" or len(content) > 1:
                raise EngineError("the prompt does not end where the assistant's turn begins")
            if next(frames, None) is not None:
                raise EngineError("more frames were given than the prompt has pads for")
            return Chat(messages, content[0]["text"] if content else "")
        only_text = all(part["type"] == "text" for part in content)
        said = "".join(part["text"] for part in content) if only_text else content
        messages.append({"role": role, "content": said})
        place = stop + 1
    raise EngineError(f"the prompt does not end with {ASSISTANT!r}")


def _parts(
    ids: Sequence[int], opened: int, closed: int, frames: Any, encoder: ChatEncoder, urls: FrameUrls
) -> list[dict[str, Any]]:
    """Text and images of one turn, in order; the first part is text."""
    parts: list[dict[str, Any]] = []
    place = 0
    while True:
        at = next((i for i in range(place, len(ids)) if ids[i] == opened), len(ids))
        parts.append({"type": "text", "text": encoder.tokenizer.decode(ids[place:at])})
        if at == len(ids):
            return parts
        stop = next((i for i in range(at, len(ids)) if ids[i] == closed), len(ids))
        visual = next(frames, None)
        pads = ids[at + 1 : stop]
        if visual is None or len(pads) != visual.token_count or set(pads) != {encoder.image_pad_id}:
            raise EngineError(f"a run of {len(pads)} {IMAGE_PAD} stands for no frame of the request")
        if visual.image is None:
            raise EngineError("a frame has no pixels; decode it again first")
        parts.append({"type": "image_url", "image_url": {"url": urls.of(visual.image)}})
        place = stop + 1


def written(reply: ChatReply) -> str:
    """What the model wrote, as one text: servers that parse replies take think and calls out of it."""
    message = reply.message
    think = message.get("reasoning_content") or message.get("reasoning")
    text = reply.text
    if isinstance(think, str) and think.strip() and "</think>" not in text:
        text = f"<think>\n{think.strip()}\n</think>\n\n{text}"
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {} if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        with suppress(ValueError):  # the one parser says what is wrong with it
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        body = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
        text += f"\n<tool_call>\n{body}\n</tool_call>"
    return text


def _identity(request: Request) -> tuple:
    return request.ids, request.sampling, tuple((v.video, v.time_s, v.grid_thw) for v in request.visuals)
