"""An engine that answers from a script, so that tests can say what the model wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paravt.chat import ChatEncoder
from paravt.engines.base import EngineError, Generation, Request


@dataclass(frozen=True)
class Cut:
    """A reply that hit the token limit: no end token, finish reason "length"."""

    text: str


@dataclass(frozen=True)
class Prompt:
    """What the script sees of a request: the whole prompt as text, and which sample of it is asked for."""

    text: str
    request: Request
    sample: int

    @property
    def turn(self) -> int:
        """Assistant turns before this one."""
        return self.text.count("<|im_start|>assistant\n") - 1

    @property
    def is_subagent(self) -> bool:
        return "<|im_start|>system\n" not in self.text

    @property
    def last_user(self) -> str:
        """Text of the last user turn, frames left out."""
        said = self.text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        return said.rpartition("<|vision_end|>")[2]


Reply = str | Cut | EngineError


class ScriptedEngine:
    """The Engine protocol over `reply(prompt) -> text`. `calls` keeps the requests of each call.

    Log-probs are -1/8, -2/8, ...: exact in float32, and different for each token. A reply that is an
    EngineError refuses its request, as a real engine does.
    """

    def __init__(
        self, encoder: ChatEncoder, reply: Callable[[Prompt], Reply], weight_version: int = 0
    ) -> None:
        self.encoder = encoder
        self.reply = reply
        self.weight_version = weight_version
        self.calls: list[list[Request]] = []

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        self.calls.append(list(requests))
        return [
            [self._answer(number, request, sample) for sample in range(request.sampling.n)]
            for number, request in enumerate(requests)
        ]

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        return self.generate(requests)

    def load_weights(self, folder: str, version: int) -> None:
        self.weight_version = version

    def _answer(self, number: int, request: Request, sample: int) -> Generation:
        prompt = Prompt(self.encoder.tokenizer.decode(list(request.ids)), request, sample)
        reply = self.reply(prompt)
        if isinstance(reply, EngineError):
            raise EngineError(str(reply), request=number)
        cut = isinstance(reply, Cut)
        ids = self.encoder.tokenizer.encode(reply.text if cut else reply, add_special_tokens=False)
        if not cut:
            ids.append(self.encoder.end_id)
        logprobs = [-(i + 1) / 8 for i in range(len(ids))]
        return Generation(ids, logprobs, "length" if cut else "stop", self.weight_version, 0.25)
