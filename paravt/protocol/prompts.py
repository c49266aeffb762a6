"""What the model is told: system prompts, questions, the sub-agent's instruction, and error texts.

One tool, `crop_video`, described once as a JSON schema; the prompts and the parser both take its name and
its limits from here. Four modes:

    direct           answer at once
    reasoning        think, then answer
    agentic          think, call crop_video any number of times in one turn, think again, answer
    agentic_minimal  the same in a few dozen tokens, for small models

An answer stands in `<answer>` tags in each mode. `THINK_PREFIX` is put before each turn of the main agent
where the caller forces the think; it is part of the turn's text from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
from pathlib import PurePosixPath
import re
from typing import Literal
from urllib.parse import unquote

from paravt.rollout import LETTERS, Sample

Mode = Literal["direct", "reasoning", "agentic", "agentic_minimal"]

TOOL_NAME = "crop_video"
MAX_CROP_FRAMES = 16
THINK_PREFIX = "<think>\n"
FORCED_ANSWER = "No more tool calls. Give your final answer now in <answer></answer>."

_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Look closely at one time window of the video. Another viewer watches the frames of the window "
            "and reports in words what happens in it."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "video_path": {"type": "string", "description": "The video's name, as given."},
                "start_time": {"type": "number", "description": "Start of the window, in seconds."},
                "end_time": {"type": "number", "description": "End of the window, in seconds."},
                "num_frames": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_CROP_FRAMES,
                    "description": f"Most frames to look at; {MAX_CROP_FRAMES} if left out.",
                },
            },
            "required": ["video_path", "start_time", "end_time"],
        },
    },
}

_DIRECT = "You answer questions about a video. Put only the answer in <answer></answer>."

_REASONING = (
    "You answer questions about a video. First reason inside <think></think>, then put only the answer in "
    "<answer></answer>."
)

_AGENTIC = """You answer questions about a video. You see a few frames of it, each after its time. \
What happens between them you can find out with a tool.

# Tool

<tools>
{schema}
</tools>

# How to reply

Start every reply by reasoning inside <think></think>. After it do one of two things.

To look closer, write one block per window:
<tool_call>
{call}
</tool_call>
Windows that do not depend on each other belong in the same reply, one block after another (at most \
{max_calls}); they are looked at together, and you get one report per block, in the same order.

When you know enough, put only the answer in <answer></answer>. A reply holds either calls or an answer, \
never both."""

# The path is left out here: a call always goes to the sample's own video, whatever path it names.
_MINIMAL = """Think in <think></think>. Then look closer with one or more calls, or answer in \
<answer></answer>.
<tool_call>
{"name": "crop_video", "arguments": {"start_time": number, "end_time": number}}
</tool_call>"""

_HOW_TO_ANSWER = {
    "mcq": "Answer with the letter.",
    "tvg": "Answer with the times in seconds, as: start to end.",
    "oe": "Answer in a few words.",
}


def tool_schema() -> dict:
    """The JSON schema of `crop_video` in OpenAI's function form; a fresh copy at each call."""
    return json.loads(json.dumps(_SCHEMA))


def system_prompt(mode: Mode, max_calls: int = 5) -> str | None:
    """The system text of a mode. Raises ValueError for a mode that does not exist."""
    if mode == "direct":
        return _DIRECT
    if mode == "reasoning":
        return _REASONING
    if mode == "agentic":
        example = {"video_path": "NAME", "start_time": 12.5, "end_time": 20.0}
        call = json.dumps({"name": TOOL_NAME, "arguments": example})
        return _AGENTIC.format(schema=json.dumps(_SCHEMA), call=call, max_calls=max_calls)
    if mode == "agentic_minimal":
        return _MINIMAL
    raise ValueError(
        f"prompt mode {mode!r} does not exist; use direct, reasoning, agentic or agentic_minimal"
    )


def question_text(sample: Sample, mode: Mode) -> str:
    """The user's text after the frames: question, options with their letters, how to answer.

    In mode `agentic` the video's base name comes first, since the tool asks for it.
    """
    lines = [f"Video: {video_name(sample.video)}"] if mode == "agentic" else []
    return "\n".join([*lines, question_lines(sample)])


def question_lines(sample: Sample) -> str:
    """Question, options with their letters, how to answer."""
    lines = [sample.question.strip()]
    options = plain_options(sample.options)
    lines += [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return "\n".join([*lines, answer_hint(sample.question_type)])


def answer_hint(question_type: str) -> str:
    """How an answer to a question of that type is to be written."""
    return _HOW_TO_ANSWER[question_type]


def plain_options(options: Sequence[str]) -> tuple[str, ...]:
    """The texts of the options; letters that a dataset wrote before them ("A. circle") are taken off.

    Only if each option carries its own letter: "A. Lincoln" among plain options is a name.
    """
    stripped = [
        re.sub(rf"^\s*\(?{letter}\s*[.):]\s*", "", text)
        for letter, text in zip(LETTERS, options, strict=False)
    ]
    lettered = len(stripped) > 1 and all(
        new and new != old.strip() for new, old in zip(stripped, options, strict=False)
    )
    return tuple(stripped) if lettered else tuple(options)


def video_name(video: str) -> str:
    """The last part of a path or file URI (decoded once): all that a prompt tells about where a file lies."""
    path = unquote(video.removeprefix("file://")) if video.startswith("file://") else video
    return PurePosixPath(path).name


def subagent_instruction(window_s: tuple[float, float], question: str | None = None) -> str:
    """What a sub-agent is asked about the frames of one window; `question` only if it may see it."""
    start_s, end_s = window_s
    text = f"Segment {start_s:.1f} to {end_s:.1f} seconds. Describe in order what happens, with times."
    return f"{text}\nIt should help to answer: {question.strip()}" if question else text


def unknown_tool(name: object) -> str:
    """The text that answers a call of a tool that does not exist; the name cannot carry tags into it."""
    shown = re.sub(r"[^\w.-]", "?", str(name)[:60])
    return f"unknown tool {shown}; available: {TOOL_NAME}"


def over_cap(max_calls: int) -> str:
    """The text that answers each call past the cap of its turn."""
    return f"not run: at most {max_calls} calls a turn"
