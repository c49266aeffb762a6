"""The conversation's grammar: tool schema, prompt modes, parsing of calls, reading of answers."""

from paravt.protocol.answers import read_choice, read_open, read_span
from paravt.protocol.prompts import (
    FORCED_ANSWER,
    MAX_CROP_FRAMES,
    THINK_PREFIX,
    TOOL_NAME,
    over_cap,
    plain_options,
    question_text,
    subagent_instruction,
    system_prompt,
    tool_schema,
    unknown_tool,
    video_name,
)
from paravt.protocol.turn import TagSpan, missing_closers, parse_turn, tag_spans
from paravt.rollout import ToolCall, ToolError, Turn

__all__ = [
    "FORCED_ANSWER",
    "MAX_CROP_FRAMES",
    "THINK_PREFIX",
    "TOOL_NAME",
    "TagSpan",
    "ToolCall",
    "ToolError",
    "Turn",
    "missing_closers",
    "over_cap",
    "parse_turn",
    "plain_options",
    "question_text",
    "read_choice",
    "read_open",
    "read_span",
    "subagent_instruction",
    "system_prompt",
    "tag_spans",
    "tool_schema",
    "unknown_tool",
    "video_name",
]
