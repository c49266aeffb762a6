"""A loose hand: the formats in which a tool-native model writes what it means.

The tiny base is to stand for a model that knows tools by habit: it writes calls in two styles, forgets
closers, leaves answers bare. This module turns a well-formed turn into such a one. It is used to pretrain the
base and nowhere else; SFT then teaches the one format.
"""

from __future__ import annotations

import json
import re

import numpy as np
from pydantic import BaseModel, ConfigDict

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Looseness(BaseModel):
    """Chances per turn (per site) of each habit; all 0 leaves a turn as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python_style: float = 0.35
    """All calls of the turn as python in `<tool_code>`."""
    open_call: float = 0.15
    """Each call loses its closing tag."""
    open_think: float = 0.15
    """`</think>` is left out."""
    bare_answer: float = 0.25
    """The answer stands without tags."""
    open_answer: float = 0.15
    """`</answer>` is left out."""

    def scaled(self, factor: float) -> Looseness:
        """Each chance times `factor`, at most 1; the two habits of an answer keep their proportion."""
        chances = {name: min(1.0, chance * factor) for name, chance in self.model_dump().items()}
        answers = chances["bare_answer"] + chances["open_answer"]
        for name in ("bare_answer", "open_answer"):
            chances[name] /= max(1.0, answers)
        return Looseness(**chances)


def loosen(text: str, looseness: Looseness, rng: np.random.Generator) -> str:
    """The same turn in a loose format. `text` is a well-formed turn after its forced `<think>`."""
    think, closer, rest = text.partition("</think>\n")
    if rng.random() < looseness.open_think:
        closer = ""
    python = rng.random() < looseness.python_style

    def call(match: re.Match) -> str:
        tag, body = "tool_call", match.group(1)
        if python:
            tag, arguments = "tool_code", json.loads(body)["arguments"]
            body = f"crop_video({', '.join(f'{key}={value}' for key, value in arguments.items())})"
        end = "" if rng.random() < looseness.open_call else f"\n</{tag}>"
        return f"<{tag}>\n{body}{end}"

    rest = _CALL.sub(call, rest)
    if rest.startswith("<answer>"):
        answer = rest.removeprefix("<answer>").removesuffix("</answer>")
        draw = rng.random()
        if draw < looseness.bare_answer:
            rest = answer
        elif draw < looseness.bare_answer + looseness.open_answer:
            rest = f"<answer>{answer}"
    return think + closer + rest
