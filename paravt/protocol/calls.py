"""The calls of one block: JSON in `<tool_call>`, Python in `<tool_code>`.

Each call begun gives one outcome, in order: a ToolCall that can be run, or a ToolError whose words go back to
the model in that call's place. One bad call never takes the good ones beside it along. Python is never run:
it is read as a syntax tree, and only plain calls with literal arguments are taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import json
import re
from typing import Any, Literal
import warnings

from paravt.protocol.prompts import TOOL_NAME, unknown_tool
from paravt.rollout import ToolCall, ToolError

Outcome = ToolCall | ToolError

MAX_BLOCK_CHARS = 8_000  # far above any real block; keeps the parsers away from pathological nesting
PARAMETERS = ("video_path", "start_time", "end_time", "num_frames")
_ALIASES = {"start": "start_time", "end": "end_time"}
_FENCE = re.compile(r"^```\w*\n?(.*?)\n?```$", re.DOTALL)
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
_NEXT_OBJECT = re.compile(r'\n\s*(?=\{\s*"name")')
_TIME_LIKE = re.compile(r"[\d:.]+s?")
_REPAIRABLE = re.compile(r"^\W*(?:print\s*\(\s*)?([A-Za-z_][\w.]*)\s*\(([^()]*)\)[\W]*$")


def read_calls(body: str, kind: Literal["tool_call", "tool_code"], closed: bool) -> list[Outcome]:
    """The outcomes of one block, at least one. `closed` is False if the block lacks its closer: text after
    the calls is then passed over, since nothing says where the block should have ended.
    """
    fenced = _FENCE.match(body)
    body = (fenced[1] if fenced else body).strip()
    if not body:
        return [ToolError("empty call")]
    if len(body) > MAX_BLOCK_CHARS:
        return [ToolError(f"call too long: {len(body)} characters")]
    return _read_json(body, closed) if kind == "tool_call" else _read_python(body)


def make_call(name: Any, arguments: Any, style: Literal["json", "python"]) -> Outcome:
    """Check a call against the tool's schema.

    The path may be missing (it is only recorded) and arguments that the schema does not know are dropped.
    Whether the times make a window of the video is for the video to say.
    """
    if not isinstance(name, str):
        return ToolError('a call needs a "name" and "arguments"')
    if name != TOOL_NAME:
        return ToolError(unknown_tool(name))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolError("arguments are not a JSON object")
    if not isinstance(arguments, dict):
        return ToolError("arguments are not a JSON object")
    given = {_ALIASES.get(key, key): value for key, value in arguments.items()} | arguments
    kept = {}
    if given.get("video_path") is not None:
        kept["video_path"] = _writable(str(given["video_path"]))
    for key in ("start_time", "end_time"):
        value = given.get(key)
        if value is None:
            return ToolError(f"{TOOL_NAME} needs start_time and end_time; {key} is missing")
        if not _is_time(value):
            return ToolError(f"{key} must be a time in seconds")
        kept[key] = _writable(value) if isinstance(value, str) else value
    frames = given.get("num_frames")
    if isinstance(frames, str) and frames.isascii() and frames.isdecimal() and len(frames) < 10:
        frames = int(frames)
    if frames is not None:
        if isinstance(frames, bool) or not isinstance(frames, int | float) or frames < 1 or frames % 1:
            return ToolError("num_frames must be a whole number, 1 or more")
        kept["num_frames"] = int(frames)
    return ToolCall(name, kept, style)


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 40
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _writable(text: str) -> str:
    """Escapes can spell half a surrogate pair, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_json(body: str, closed: bool) -> list[Outcome]:
    decoder = json.JSONDecoder(strict=False)
    at, outcomes = 0, []
    while at < len(body):
        if body[at].isspace() or body[at] == ",":
            at += 1
            continue
        if outcomes and body[at] not in "{[":
            if closed:
                outcomes[-1] = ToolError("not valid JSON: text after the last brace of the call")
            break
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be read"
            outcomes.append(ToolError(f"not valid JSON: {reason}"))
            following = _NEXT_OBJECT.search(body, at)
            if not following:
                break
            at = following.end()
            continue
        several = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        for item in value if several else [value]:
            if isinstance(item, dict):
                outcomes.append(make_call(item.get("name"), item.get("arguments"), "json"))
            else:
                outcomes.append(ToolError('a call is a JSON object with "name" and "arguments"'))
    return outcomes or [ToolError("empty call")]


def _read_python(body: str) -> list[Outcome]:
    tree = _parse(body)
    if tree is not None:
        outcomes = [outcome for node in tree.body for outcome in _statement(node)]
        return outcomes or [ToolError("no call in this block")]
    lines = [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    outcomes = [outcome for line in lines for outcome in _line(line)]
    if len(outcomes) == 1 or any(isinstance(outcome, ToolCall) for outcome in outcomes):
        return outcomes
    # Nothing to keep apart: a block that cannot be read at all is one failed call.
    return [ToolError("not a valid Python call")]


def _parse(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except _PARSE_ERRORS:
            return None


def _line(line: str) -> Iterator[Outcome]:
    """One line of a block that does not parse as a whole; stray quotes and brackets are repaired."""
    tree = _parse(line.strip())
    match = _REPAIRABLE.match(line)
    if tree is not None:
        for node in tree.body:
            yield from _statement(node)
    elif match:
        yield _repaired(match[1], match[2])
    elif re.search(r"\w\(", line):
        yield ToolError("not a valid Python call")


def _repaired(name: str, arguments: str) -> Outcome:
    """A call whose quotes do not pair up: quotes are dropped, values split at commas."""
    positional, named = [], {}
    for part in re.sub(r"[\"'`]", "", arguments).split(","):
        key, equals, value = part.rpartition("=")
        if not part.strip():
            continue
        if equals:
            named[key.strip()] = _number(value.strip())
        else:
            positional.append(_number(value.strip()))
    return _bind(name, positional, named)


def _number(text: str) -> float | str:
    try:
        return ast.literal_eval(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?|\.\d+", text) else text
    except _PARSE_ERRORS:
        return text


def _statement(node: ast.stmt) -> Iterator[Outcome]:
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and node.value is not None:
        yield from _expression(node.value)
    elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.AnnAssign):
        yield ToolError("only plain calls are run")


def _expression(node: ast.expr) -> Iterator[Outcome]:
    if isinstance(node, ast.Await):
        yield from _expression(node.value)
    elif isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            yield from _expression(item)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "(" in node.value:
        # The whole call in quotes.
        inner = _parse(node.value.strip())
        for statement in inner.body if inner else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                yield _call(statement.value)
        if not inner and f"{TOOL_NAME}(" in node.value:
            yield ToolError("not a valid Python call")
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            for item in node.args:
                yield from _expression(item)
        else:
            yield _call(node)
    elif any(isinstance(part, ast.Call) for part in ast.walk(node)):
        # A call inside a sum, a dict or a comprehension was begun too: it is answered, never passed over.
        yield ToolError("only plain calls are run")


def _call(node: ast.Call) -> Outcome:
    function = node.func
    if isinstance(function, ast.Attribute):
        name = function.attr
    elif isinstance(function, ast.Name):
        name = function.id
    else:
        return ToolError("not a valid Python call")
    if name != TOOL_NAME:
        return ToolError(unknown_tool(name))
    try:
        positional = [_value(item, is_path=i == 0) for i, item in enumerate(node.args)]
        named = {item.arg: _value(item.value, is_path=item.arg == "video_path") for item in node.keywords}
        if None in named:
            raise ValueError("a ** argument")
    except _PARSE_ERRORS:
        return ToolError("arguments must be plain values, for example start_time=12.5")
    return _bind(name, positional, named)


def _value(node: ast.expr, is_path: bool) -> Any:
    try:
        return ast.literal_eval(node)
    except _PARSE_ERRORS:
        if is_path and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return ast.unparse(node)  # a variable for the path does no harm: the path is only recorded
        raise ValueError("not a literal") from None


def _bind(name: str, positional: list, named: dict) -> Outcome:
    """Positional arguments by the schema's order; a first argument that is a time is the start time."""
    name = name.rpartition(".")[2]
    if name != TOOL_NAME:
        return ToolError(unknown_tool(name))
    pathless = positional and not (isinstance(positional[0], str) and not _TIME_LIKE.fullmatch(positional[0]))
    names = PARAMETERS[1:] if pathless else PARAMETERS
    if len(positional) > len(names):
        return ToolError(f"{TOOL_NAME} takes at most {len(PARAMETERS)} arguments")
    named = {_ALIASES.get(key, key): value for key, value in named.items()}
    bound = dict(zip(names, positional, strict=False))
    twice = bound.keys() & named.keys()
    if twice:
        return ToolError(f"{min(twice)} is given twice")
    return make_call(name, bound | named, "python")
