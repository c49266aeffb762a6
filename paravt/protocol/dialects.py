"""How the published baselines write their replies, and what the one parser makes of them.

    dialect   a turn                                                            time unit
    paravt    think, then several tool_call blocks, or an answer block          seconds, M:SS
    zoom      think, then one video_zoom {"segment": [s, e], "fps": n}, or an answer, often boxed    seconds
    clip      score, think, clip "HH:MM:SS-HH:MM:SS, ..." or empty, answer      clock
    sage      one JSON object: final_answer, or recommended_tools.tool_calls    clock
    plain     think and answer; an answer without tags is what follows the think

A call of any dialect becomes a call of our tool with its argument names, so that the rest of an episode does
not know who wrote it. A request for frames at a rate keeps the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
import re
from typing import Any, Literal

from paravt.protocol.prompts import MAX_CROP_FRAMES, TOOL_NAME
from paravt.rollout import ToolCall, ToolError

Outcome = ToolCall | ToolError


@dataclass(frozen=True)
class Dialect:
    """`blocks` are tags whose bodies are calls, besides ours. `answers` says which of several answer blocks
    counts; `untagged`: without one, the text after the think is the answer; `boxed`: \\boxed{} is taken off.
    """

    name: str
    blocks: tuple[str, ...] = ()
    answers: Literal["first", "last"] = "last"
    untagged: bool = False
    boxed: bool = False


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("paravt"),
        Dialect("paravt_first", answers="first"),
        Dialect("zoom", ("video_zoom",), untagged=True, boxed=True),
        Dialect("clip", ("clip",), untagged=True),
        Dialect("sage"),
        Dialect("plain", untagged=True, boxed=True),
        Dialect("plain_first", answers="first", untagged=True, boxed=True),
    )
}

_CLIP = re.compile(
    r"\s*(\d+(?::\d+){0,2}(?:\.\d+)?)\s*(?:-|–|to)\s*(\d+(?::\d+){0,2}(?:\.\d+)?)\s*", re.ASCII
)
_BOXED = re.compile(r"\\+boxed\s*\{+\s*(.*?)\s*\}+\s*\.?\s*$", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
_JSON_TAG = re.compile(r"<json>(.*?)(?:</json>|\Z)", re.DOTALL)
_THINK = re.compile(r"(?:.*</think>|<think>.*\Z)", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|answer|score|clip|video_zoom|tool_call|tool_code|glue)>")


def read_block(body: str, kind: str) -> list[Outcome]:
    """The calls of a `video_zoom` or `clip` block; an empty `clip` asks for nothing."""
    return _zoom(body) if kind == "video_zoom" else _clips(body)


def _zoom(body: str) -> list[Outcome]:
    try:
        data, _ = json.JSONDecoder(strict=False).raw_decode(body.strip())
    except (ValueError, RecursionError):
        return [ToolError('not valid JSON; write {"segment": [start, end], "fps": n}')]
    segment = data.get("segment") if isinstance(data, dict) else None
    if not isinstance(segment, list) or len(segment) != 2 or not all(map(_is_time, segment)):
        return [ToolError("segment must be [start, end], in seconds")]
    fps = data.get("fps", 1)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e3:
        return [ToolError("fps must be a number above 0")]
    call = ToolCall(TOOL_NAME, {"start_time": segment[0], "end_time": segment[1], "fps": float(fps)})
    if all(isinstance(value, int | float) for value in segment):
        frames = fps * (segment[1] - segment[0])
        if frames > MAX_CROP_FRAMES + 1e-6:
            return [ToolError(f"the segment would have {frames:.0f} frames; at most {MAX_CROP_FRAMES}")]
    return [call]


def _clips(body: str) -> list[Outcome]:
    found: list[Outcome] = []
    for part in re.split(r"[,;\n]", body):
        if not part.strip():
            continue
        match = _CLIP.fullmatch(part)
        if match:
            found.append(ToolCall(TOOL_NAME, {"start_time": match[1], "end_time": match[2]}))
        else:
            found.append(ToolError("write a clip as HH:MM:SS-HH:MM:SS"))
    return found


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 40
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


@dataclass(frozen=True)
class SageReply:
    """What the JSON object of a SAGE turn says; `closed` if the object could be read to its end."""

    think: str
    calls: tuple[Outcome, ...]
    answer: str | None
    closed: bool


def read_sage(text: str) -> SageReply:
    """The object in json tags, in a fence, or bare. Only the first tool call of a turn is run there, and only
    one without a final answer.
    """
    match = _JSON_TAG.search(text) or _FENCE.search(text)
    body = match[1] if match else text[text.find("{") :] if "{" in text else ""
    try:
        data, _ = json.JSONDecoder(strict=False).raw_decode(body.strip())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return SageReply("", (), None, False)
    verdict = data.get("answerable")
    reasons = [data.get("video_context"), data.get("query_intent")]
    reasons.append(verdict.get("reasoning") if isinstance(verdict, dict) else None)
    think = "\n".join(reason for reason in reasons if isinstance(reason, str))
    answer = data.get("final_answer")
    if isinstance(answer, bool) or answer is None or str(answer).strip().casefold() in ("", "null", "none"):
        answer = None
    tools = data.get("recommended_tools")
    calls = tools.get("tool_calls") if isinstance(tools, dict) and tools.get("needed") is not False else None
    if answer is not None or not isinstance(calls, list) or not calls:
        return SageReply(think, (), None if answer is None else str(answer), True)
    return SageReply(think, (_sage_call(calls[0]),), None, True)


def _sage_call(call: Any) -> Outcome:
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(arguments, dict):
        return ToolError('a tool call needs "name" and "arguments"')
    start, end = (
        next((arguments[name] for name in names if arguments.get(name) is not None), None)
        for names in (("timestamp_start", "start_time", "start"), ("timestamp_end", "end_time", "end"))
    )
    if start is None or end is None or not _is_time(start) or not _is_time(end):
        name = re.sub(r"[^\w.-]", "?", str(call.get("name"))[:60])
        return ToolError(f"{name} is not available here; extract_parts_from_timestamp is")
    return ToolCall(TOOL_NAME, {"start_time": start, "end_time": end})


def unboxed(answer: str) -> str:
    """The inside of a last \\boxed{...}; the text as it is without one."""
    match = _BOXED.search(answer)
    return match[1] if match else answer


def untagged_answer(text: str) -> str | None:
    """What a reply without an answer block says after its think; None if that is nothing."""
    return _TAGS.sub(" ", _THINK.sub("", text, count=1)).strip() or None
