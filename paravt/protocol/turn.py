"""One assistant turn, read once: think, calls, answer, and where their tags stand.

The turn is cut into blocks by its structural tags, from left to right:

    think        from the first `<think>` to the first `</think>` after it; nothing inside is run or read
    call         `<tool_call>` (JSON) or `<tool_code>` (Python)
    answer       `<answer>`

A block ends at its own closer, or unclosed at the next structural tag or at the end of the text. What the
blocks mean: calls run, after an unclosed think too; a call beats an answer in the same turn; of several
answer blocks the last is read. This is the only parser: episodes, rewards, anchors and evaluation use it.
What published baselines write is read by the same scan with the tags of their dialect (`dialects`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
import re
from typing import Literal

from paravt.protocol.calls import read_calls
from paravt.protocol.dialects import DIALECTS, Dialect, read_block, read_sage, unboxed, untagged_answer
from paravt.protocol.prompts import over_cap
from paravt.rollout import ToolError, Turn

BlockKind = Literal["think", "tool_call", "tool_code", "answer", "video_zoom", "clip"]
SiteKind = Literal["think", "call", "answer"]

_TAGS = ("think", "tool_call", "tool_code", "answer")
_TAG = re.compile(rf"<(/?)({'|'.join(_TAGS)})>")
_SITE: dict[str, SiteKind] = {"think": "think", "tool_call": "call", "tool_code": "call", "answer": "answer"}
_CONTROL = re.compile(r"<\|[a-z_]+\|>")

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A stretch of a turn between two tags; `opener` or `closer` is None where the tag is missing."""

    kind: BlockKind
    body: Span
    opener: Span | None
    closer: Span | None

    @property
    def complete(self) -> bool:
        return self.opener is not None and self.closer is not None


@dataclass(frozen=True)
class TagSpan:
    """Where a tag stands in the turn's text: characters [start, end). A missing closer has start == end."""

    kind: SiteKind
    start: int
    end: int


def parse_turn(text: str, max_calls: int = 5, dialect: str = "paravt") -> Turn:
    """Read the whole text of one assistant turn, the forced prefix included. Never raises on any text.

    `calls` has one outcome per call begun: a ToolCall, or a ToolError with the words that go back to the
    model. Calls past `max_calls` become ToolErrors of kind "over_cap". `dialect` names who wrote the text.
    """
    spoken = DIALECTS[dialect]
    if dialect == "sage":
        return _sage_turn(text)
    pattern = _TAG if not spoken.blocks else re.compile(rf"<(/?)({'|'.join(_TAGS + spoken.blocks)})>")
    thinks, others = _scan(text, pattern)
    calls = [call for block in others if block.kind != "answer" for call in _outcomes(text, block)]
    calls[max_calls:] = [ToolError(over_cap(max_calls), "over_cap")] * len(calls[max_calls:])
    call_blocks = [block for block in others if block.kind != "answer"]
    answer_blocks = [block for block in others if block.kind == "answer"]
    answers = tuple(_body(text, block) for block in answer_blocks)
    turn = Turn(
        think="\n".join(_body(text, block) for block in thinks) if thinks else None,
        calls=tuple(calls),
        answer=answers[-1] if answers and not calls else None,
        think_opened=bool(thinks) and all(block.opener for block in thinks),
        think_closed=bool(thinks) and all(block.closer for block in thinks),
        calls_closed=all(block.complete for block in call_blocks),
        answer_opened=bool(answer_blocks),
        answer_closed=bool(answer_blocks) and all(block.complete for block in answer_blocks),
        answers=answers,
    )
    return turn if dialect == "paravt" else _in_dialect(text, turn, spoken)


def _in_dialect(text: str, turn: Turn, spoken: Dialect) -> Turn:
    """The answer as its family means it: the first or the last block, without a box, or what has no tags."""
    if turn.calls:
        return turn
    said = [answer for answer in turn.answers if answer]
    answer = turn.answer if not said else said[0] if spoken.answers == "first" else said[-1]
    if answer is None and spoken.untagged:
        answer = untagged_answer(_CONTROL.sub("", text))
    return replace(turn, answer=unboxed(answer) if answer is not None and spoken.boxed else answer)


def _sage_turn(text: str) -> Turn:
    """A JSON object has no tags: its parts stand for the sites that were closed."""
    reply = read_sage(_CONTROL.sub("", text))
    answered = reply.answer is not None
    return Turn(
        think=reply.think or None,
        calls=reply.calls,
        answer=reply.answer,
        think_opened=bool(reply.think),
        think_closed=bool(reply.think) and reply.closed,
        answer_opened=answered,
        answer_closed=answered and reply.closed,
        answers=(reply.answer,) if answered else (),
    )


def tag_spans(text: str) -> list[TagSpan]:
    """The tags of the turn's blocks, in order of the text.

    Tags inside a closed think are text, and so are stray closers that end no block: neither is listed.
    """
    return [
        TagSpan(_SITE[block.kind], *span)
        for block in _blocks(text)
        for span in (block.opener, block.closer)
        if span is not None
    ]


def missing_closers(text: str) -> list[TagSpan]:
    """Where a closer should have stood: an empty span at the character where the unclosed block ended."""
    return [
        TagSpan(_SITE[block.kind], block.body[1], block.body[1])
        for block in _blocks(text)
        if block.closer is None
    ]


def _blocks(text: str) -> list[Block]:
    thinks, others = _scan(text)
    return sorted(thinks + others, key=lambda block: block.body)


def _body(text: str, block: Block) -> str:
    return _CONTROL.sub("", text[slice(*block.body)]).strip()


def _outcomes(text: str, block: Block) -> list:
    if block.kind in ("video_zoom", "clip"):
        return read_block(_body(text, block), block.kind)
    return read_calls(_body(text, block), block.kind, closed=block.closer is not None)


def _scan(text: str, pattern: re.Pattern = _TAG) -> tuple[list[Block], list[Block]]:
    """Think blocks, then call and answer blocks, each list in order."""
    tags = list(pattern.finditer(text))
    thinks = list(_thinks(tags, len(text)))
    closed = {block.opener[0]: block for block in thinks if block.opener and block.closer}
    others: list[Block] = []
    opened: re.Match | None = None
    # Where text without an opener may begin, and how far a closed think hides what it holds.
    floor = hidden = thinks[0].closer[1] if thinks and not thinks[0].opener else 0

    def end(at: int) -> None:
        nonlocal opened
        if opened:
            others.append(Block(opened[2], (opened.end(), at), opened.span(), None))
        opened = None

    for tag in tags:
        if tag.start() < hidden:
            continue
        if tag[1] and not opened:
            others += _without_opener(text, floor, tag)
        elif tag[1] and opened[2] == tag[2]:
            others.append(Block(tag[2], (opened.end(), tag.start()), opened.span(), tag.span()))
            opened = None
        else:
            end(tag.start())
            if tag.start() in closed:
                hidden = closed[tag.start()].closer[1]
            elif not tag[1] and tag[2] != "think":
                opened = tag
        floor = max(tag.end(), hidden)
    end(len(text))
    return thinks, others


def _thinks(tags: list[re.Match], length: int) -> Iterator[Block]:
    """Closed thinks, and at most one open at the end. A first closer with no opener closes all before it."""
    opener: re.Match | None = None
    seen = False
    for tag in tags:
        if tag[2] != "think":
            continue
        if not tag[1]:
            opener = opener or tag
        elif opener:
            yield Block("think", (opener.end(), tag.start()), opener.span(), tag.span())
            opener, seen = None, True
        elif not seen:
            yield Block("think", (0, tag.start()), None, tag.span())
            seen = True
    if opener:
        after = (tag.start() for tag in tags if tag.start() >= opener.end() and tag[2] != "think")
        yield Block("think", (opener.end(), next(after, length)), opener.span(), None)


def _without_opener(text: str, floor: int, closer: re.Match) -> list[Block]:
    """The block that a closer ends although nothing opened it, if the text before it can be read as one.

    Only the last line is taken for an answer, and for a call if the whole is none: the rest is talk.
    """
    before = text[floor : closer.start()].rstrip()
    last_line = floor + before.rfind("\n") + 1
    for start in (floor, last_line):
        body = text[start : closer.start()].strip()
        if closer[2] == "answer":
            found = start == last_line and bool(body)
        else:
            found = closer[2] in ("tool_call", "tool_code") and not any(
                isinstance(outcome, ToolError) for outcome in read_calls(body, closer[2], closed=True)
            )
        if found:
            return [Block(closer[2], (start, closer.start()), None, closer.span())]
    return []
