"""What makes a row of a table wrong: pure checks with the project's own parser and readers.

Each returns `OK` or one sentence about the row, so that a suite can ask for "all values are ok" and show the
sentences of those that are not. Arguments are raw JSON values; none of them is trusted to have a type.
"""

from __future__ import annotations

import math
from typing import Any

from paravt import protocol
from paravt.protocol.sites import format_sites
from paravt.rollout import LETTERS
from paravt.times import TimeError, parse_window

OK = "ok"
QUESTION_TYPES = ("mcq", "tvg", "oe")
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|endoftext|>",
)
SPAN_SLACK_S = 1e-6


def check_answer(question_type: object, answer: object, options: object) -> str:
    """Whether the answer fits its type: a letter among the options, a span of two times, a text."""
    if question_type == "mcq":
        if not isinstance(options, (list, tuple)) or len(options) < 2:
            return "a choice needs at least 2 options"
        if not all(isinstance(option, str) and option.strip() for option in options):
            return "an option is empty or not a text"
        if len(set(options)) != len(options):
            return "two options are equal"
        if not (isinstance(answer, str) and len(answer) == 1 and answer in LETTERS[: len(options)]):
            return f"answer {answer!r} is not a letter of its {len(options)} options"
    elif question_type == "tvg":
        if not is_span(answer):
            return f"answer {answer!r} is not a span of two times in seconds, start first"
    elif question_type == "oe":
        if not (isinstance(answer, str) and answer.strip()):
            return f"answer {answer!r} is not a text"
    else:
        return f"question_type {question_type!r} is none of {', '.join(QUESTION_TYPES)}"
    return OK


def is_span(value: object) -> bool:
    """Two finite numbers in order."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in value)
        and value[0] <= value[1]
    )


def check_span(span_s: object, duration_s: float) -> str:
    """Whether a span lies inside [0, duration_s] seconds."""
    if not is_span(span_s):
        return f"{span_s!r} is not a span of two times in seconds, start first"
    start_s, end_s = span_s
    if start_s < 0 or end_s > duration_s + SPAN_SLACK_S:
        return f"span {start_s:g} to {end_s:g} s leaves the video of {duration_s:g} s"
    return OK


def whole_turn(text: str) -> str:
    """The turn as the model reads it: the forced `<think>` is put before a text that does not open one."""
    return text if text.startswith("<think>") else protocol.THINK_PREFIX + text


def check_roles(kind: object, turns: object) -> str:
    """Main: assistant, tool, assistant, ..., ending with the assistant. Sub-agent: one assistant turn."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        return "turns are not a list of objects"
    roles = [turn.get("role") for turn in turns]
    if kind == "subagent":
        return (
            OK if roles == ["assistant"] else f"roles {roles}, but a sub-agent's trace is one assistant turn"
        )
    wanted = ["tool" if i % 2 else "assistant" for i in range(len(roles))]
    if roles != wanted or len(roles) % 2 == 0:
        return f"roles {roles} do not alternate from assistant to assistant"
    return OK


def check_targets(kind: object, turns: list[dict]) -> str:
    """Whether each text to be learned parses well formed, and each call has its result.

    A sub-agent's report is plain text: it must hold something, and none of the grammar's tags.
    """
    if check_roles(kind, turns) != OK:
        return "not read: the roles are out of order"
    for number, turn in enumerate(turns, 1):
        texts = [turn.get("text")] if turn["role"] == "assistant" else turn.get("results")
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            return f"turn {number} has an empty or missing text"
        if found := [token for text in texts for token in CONTROL if token in text]:
            return f"turn {number} holds the control token {found[0]}"
    if kind == "subagent":
        text = turns[0]["text"]
        return OK if not protocol.tag_spans(text) else "a report holds tags of the turn grammar"
    parsed = [protocol.parse_turn(whole_turn(turn["text"])) for turn in turns[::2]]
    for number, turn in enumerate(parsed):
        if not turn.well_formed:
            fault = next(site.reason for site in format_sites([turn]) if not site.ok)
            return f"turn {2 * number + 1} is not well formed: {fault}"
        last = number == len(parsed) - 1
        if last == bool(turn.calls):
            fault = "ends the trace with calls" if last else "answers before the end"
            return f"turn {2 * number + 1} {fault}"
        if not last and len(turns[2 * number + 1]["results"]) != len(turn.calls):
            results = len(turns[2 * number + 1]["results"])
            return f"turn {2 * number + 1} has {len(turn.calls)} calls and {results} results"
    return OK


def check_windows(kind: object, turns: list[dict], window_s: object, duration_s: float) -> str:
    """Whether each window that a trace looks at lies inside its video."""
    if kind == "subagent":
        return check_span(window_s, duration_s)
    if check_targets(kind, turns) != OK:
        return "not read: a target does not parse"
    for turn in turns[::2]:
        for call in protocol.parse_turn(whole_turn(turn["text"])).valid_calls:
            start, end = call.arguments.get("start_time"), call.arguments.get("end_time")
            try:
                window = parse_window(start, end, duration_s)
            except TimeError as error:
                return f"call {start} to {end}: {error}"
            if window.clamped:
                return f"call {start} to {end} leaves the video of {duration_s:g} s"
    return OK


def check_agreement(kind: object, turns: list[dict], sample: dict) -> str:
    """Whether the answer that a main trace ends with agrees with its question's answer, by the one reader."""
    if kind == "subagent":
        return OK
    if check_targets(kind, turns) != OK or check_answer(*_answer_fields(sample)) != OK:
        return "not read: a target or the answer is wrong"
    question_type, gold, options = _answer_fields(sample)
    text = protocol.parse_turn(whole_turn(turns[-1]["text"])).answer or ""
    if question_type == "mcq":
        read = protocol.read_choice(text, tuple(options))
        agrees = read == gold
    elif question_type == "tvg":
        read = protocol.read_span(text)
        agrees = read is not None and min(read[1], gold[1]) >= max(read[0], gold[0])
    else:
        read = protocol.read_open(text)
        agrees = read == protocol.read_open(gold)
    return OK if agrees else f"the trace answers {read!r}, the question's answer is {gold!r}"


def _answer_fields(sample: dict) -> tuple[Any, Any, Any]:
    return sample.get("question_type"), sample.get("answer"), sample.get("options")
