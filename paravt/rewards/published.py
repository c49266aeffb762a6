"""The released format rules and tool ladder, for reproducing the published arms.

Format is a sum over the episode's whole text (all assistant turns, forced prefixes included), cut at 1:

    term                                             para and suffix    vanilla
    a think of 10 characters or more, closed or not        0.2            0.3
    an answer with content, `<answer>` written             0.3            0.2
    an answer with content, `</answer>` written            0.2            0.1
    a think that precedes a call that can be read          0.3            0.3
    all tags in pairs, and a positive score so far         0.1            0.1
    anchor: lambda x (0.4 alpha + 0.3 beta - 0.3 gamma)    lambda 0.5 (para), 0 (suffix, vanilla)

    alpha  a think that counts, and `</think>`
    beta   think, `</think>`, then a closed answer
    gamma  `<think>` without any `</think>`

There are three repairs. The release never saw the forced `<think>`, which lay in the prompt; here it is part
of the text. A call can be read if the project's parser reads it. And the ladder of the tool reward reads what
ran from the executions, not from a tag in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import re

from paravt.protocol import parse_turn
from paravt.rollout import Rollout

MIN_THINK_CHARS = 10
ANCHOR_LAMBDA = 0.5
TAGS = ("think", "tool_call", "tool_code", "answer")

_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_CLOSED_FLOW = re.compile(r"<think>.*?</think>.*?<answer>.*?</answer>", re.DOTALL)
_CALL_BLOCK = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|<tool_code>.*?(?:</tool_code>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Weights:
    think: float
    answer_opener: float
    answer_closer: float
    anchor: float


VARIANTS = {
    "published_para": Weights(0.2, 0.3, 0.2, ANCHOR_LAMBDA),
    "published_suffix": Weights(0.2, 0.3, 0.2, 0.0),
    "published_vanilla": Weights(0.3, 0.2, 0.1, 0.0),
}


def episode_text(rollout: Rollout) -> str:
    """All assistant turns of an episode, one after another; nothing that the tools returned."""
    return "\n".join(turn.text for turn in rollout.turns)


def published_format(text: str, variant: str) -> float:
    """The released format score of an episode's text; at most 1, and as low as -0.15."""
    weights = VARIANTS[variant]
    think = _long_think(text)
    answered = _has_answer_body(text)
    score = weights.think * bool(think)
    score += weights.answer_opener * (answered and "<answer>" in text)
    score += weights.answer_closer * (answered and "</answer>" in text)
    score += anchor_bonus(text, weights.anchor)
    if think and any(think.start() < at for at in _readable_calls(text)):
        score += 0.3
    if score > 0 and all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in TAGS):
        score += 0.1
    return min(score, 1.0)


def anchor_bonus(text: str, weight: float = ANCHOR_LAMBDA) -> float:
    """The released anchor as one scalar: weight x (0.4 alpha + 0.3 beta - 0.3 gamma)."""
    alpha = bool(_long_think(text)) and "</think>" in text
    beta = bool(_long_think(text)) and bool(_CLOSED_FLOW.search(text))
    gamma = "<think>" in text and "</think>" not in text
    return weight * (0.4 * alpha + 0.3 * beta - 0.3 * gamma)


def published_tool(accuracy: float, readable_calls: int, call_count: int) -> float:
    """0 without a call that can be read; 0.1 with one, 0.3 if one ran; 0.5 more if accuracy is above 0."""
    if not readable_calls:
        return 0.0
    return (0.3 if call_count else 0.1) + (0.5 if accuracy > 0 else 0.0)


def degenerate(text: str) -> bool:
    """The release gives nothing at all to short texts that repeat the header of a turn."""
    return text.count("<|im_start|>") >= 5 and len(text) < 300


def _long_think(text: str) -> re.Match | None:
    return next((m for m in _THINK.finditer(text) if len(m[1].strip()) >= MIN_THINK_CHARS), None)


def _has_answer_body(text: str) -> bool:
    block = _ANSWER.search(text)
    if block:
        return bool(block[1].strip())
    before, closer, _ = text.partition("</answer>")
    return bool(closer) and bool(before.rpartition(">")[2].strip())


def _readable_calls(text: str) -> Sequence[int]:
    """Where blocks begin that hold a call which the project's parser can read."""
    return [m.start() for m in _CALL_BLOCK.finditer(text) if parse_turn(m[0]).valid_calls]
