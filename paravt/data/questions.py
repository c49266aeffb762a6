"""From the texts of published rows to questions of ours.

A published prompt holds more than the question: placeholders, how to think, how to call the tool, where the
video lies. Ours adds its own, so theirs are taken off sentence by sentence:

    <video>Which shape shows?            question   Which shape shows?
    Options:                             options    circle, square
    A. circle
    B. square
    Think first, call **crop_video** ...             (dropped)

The type is the row's, or follows from options and answer; the gold answer is read by the project's readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import json
import re
from typing import Any

from paravt import protocol
from paravt.data.checks import OK, QUESTION_TYPES, check_answer
from paravt.data.sentinel import RowError, read_messages, text_of, videos_of
from paravt.rollout import LETTERS, QuestionType, Sample

_PLACEHOLDER = re.compile(r"<(?:video|image)(?:_\d+)?>\n?")
_OPTION = re.compile(r"^\s*[(\[]?([A-J])[)\].:]\s*(\S.*)$")
_INLINE = re.compile(r"\b(?:options|choices|candidates)\s*(?:are)?\s*:\s*(?=[(\[]?A[)\].:])", re.IGNORECASE)
_LETTER = re.compile(r"(?:^|(?<=\s))[(\[]?([A-J])[)\].:]\s*")
_OPTIONS_HEADER = re.compile(r"^\s*(?:options|choices|candidates)\s*:?\s*$", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z<*\"'(])")
_INSTRUCTION = re.compile(
    r"""</?(?:think|tool_call|tool_code|tool_response|answer)> | crop_video
        | \bvideo['’]?s?\s+path\b | \bpath\s+(?:of|to|for)\s+(?:the|this)\s+video | \blongvt_source/
        | ^\W*(?:think|reason)\b.{0,20}\b(?:first|step[ -]by[ -]step)\b | ^\W*format\s+strictly
        | ^\W*(?:please\s+)?(?:answer|respond|reply|select|choose|give|provide)\b
              .*\b(?:letter|option|single\s+word|tags?|format)\b
        | as\s+if\s+you\s+were\s+a\s+human | internal\s+dialogue | self-reflection""",
    re.VERBOSE | re.IGNORECASE,
)
_ABOUT_TIME = re.compile(
    r"\b(?:when|time|times|timestamps?|moment|segment|interval|span|range|start|starts|end|ends|seconds?)\b",
    re.IGNORECASE,
)
_ASKS_TIME = re.compile(
    r"""^\W*when\b | \bat\s+what\s+times?\b
        | \b(?:time|temporal)\s+(?:range|span|window|interval|period|segment)s?\b
        | \btime-?stamps?\b | \bstart(?:ing)?\s+(?:time\s+)?(?:and|to)\s+end
        | \b(?:which|what)\s+(?:segment|interval|moment|seconds)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_TIME_WORDS = re.compile(
    r"[\d.:,;<>()\[\]~–—-]|\b(?:seconds?|secs?|s|from|to|and|between|starts?|ends?|at|the|is|answer)\b",
    re.IGNORECASE,
)
_BRACKETED_PAIR = re.compile(r"^\s*[(\[]?\s*([\d.:]+)\s*,\s*([\d.:]+)\s*[)\]]?\s*$")


@dataclass(frozen=True)
class Asked:
    """A question and its options, without letters; `dropped` sentences told how to answer."""

    question: str
    options: tuple[str, ...]
    dropped: int


def read_question(text: str) -> Asked:
    """What a published user text asks. Raises RowError if nothing is left of it."""
    lines, options, dropped = [], [], 0
    for line in _PLACEHOLDER.sub("", text).splitlines():
        if not options and (inline := _INLINE.search(line)):
            options = _inline_options(line[inline.end() :])
            line = line[: inline.start()] if options else line
        match = _OPTION.match(line)
        if match and match[1] == LETTERS[len(options) : len(options) + 1]:
            options.append(match[2].strip())
            continue
        if _OPTIONS_HEADER.match(line):
            continue
        sentences = [sentence for sentence in _SENTENCE.split(line.strip()) if sentence]
        kept = [sentence for sentence in sentences if not _INSTRUCTION.search(sentence)]
        dropped += len(sentences) - len(kept)
        if kept:
            lines.append(" ".join(kept))
    if len(options) == 1:  # "A. Lincoln signed it" is a sentence
        lines.append(f"A. {options.pop()}")
    question = "\n".join(lines).strip()
    if not question:
        raise RowError("no question is left after its instructions")
    return Asked(question, tuple(options), dropped)


def _inline_options(text: str) -> list[str]:
    """The options of "A. cat B. dog", in one line; none if their letters do not follow each other from A."""
    _, *pieces = _LETTER.split(text)
    letters, found = pieces[::2], [piece.strip(" ,;") for piece in pieces[1::2]]
    return found if len(found) > 1 and all(found) and "".join(letters) == LETTERS[: len(found)] else []


def read_gold(
    answer: Any, asked: Asked, question_type: str | None
) -> tuple[QuestionType, str | tuple[float, float]]:
    """The type and the gold answer in our form. Raises RowError if they do not fit.

    Without a type: a choice if there are options, a span if the answer is one and the question is about time.
    """
    if question_type is not None and question_type not in QUESTION_TYPES:
        raise RowError("the question type is none of mcq, tvg, oe")
    if question_type == "mcq" or (question_type is None and asked.options):
        letter = protocol.read_choice(answer if isinstance(answer, str) else None, asked.options)
        if not asked.options or letter is None:
            raise RowError("the gold answer names none of the options")
        found: tuple[QuestionType, Any] = ("mcq", letter)
    elif question_type == "tvg" or (question_type is None and _is_about_time(asked.question, answer)):
        span = _read_pair(answer)
        if span is None and question_type == "tvg":
            raise RowError("the gold answer is no span of time")
        found = ("tvg", span) if span else ("oe", answer)
    else:
        found = ("oe", answer)
    kind, gold = found
    if kind == "oe" and not (isinstance(gold, str) and gold.strip()):
        raise RowError("the gold answer is no text")
    if (fault := check_answer(kind, list(gold) if kind == "tvg" else gold, asked.options)) != OK:
        raise RowError(_short(fault))
    return kind, gold.strip() if isinstance(gold, str) else gold


def rl_sample(
    row: Mapping[str, Any], identity: str, find: Callable[[str], str], video_of: Callable[[str], str]
) -> Sample:
    """The question of a published RL row.

    `find` gives the media path of a URL, `video_of` what a table writes for it. Raises RowError.
    """
    videos = videos_of(row)
    if len(videos) != 1:
        raise RowError("it has no video" if not videos else "it has several videos")
    users = [message for message in read_messages(row.get("prompt")) if message["role"] == "user"]
    if not users:
        raise RowError("its prompt has no user message")
    extra = row.get("extra_info")
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            raise RowError("extra_info is not JSON") from None
    if not isinstance(extra, Mapping):
        raise RowError("extra_info is no object")
    asked = read_question(text_of(users[-1]))
    kind, gold = read_gold(extra.get("answer"), asked, extra.get("question_type") or "oe")
    return Sample(
        id=identity,
        video=video_of(find(videos[0])),
        question=asked.question,
        answer=gold,
        question_type=kind,
        options=asked.options if kind == "mcq" else (),
        meta={"source": str(row.get("data_source") or "rl")},
    )


def _is_about_time(question: str, answer: Any) -> bool:
    """Whether a question without a type asks for a span: outright, or by a word of time and an answer that is
    a span and nothing else.
    """
    if not isinstance(answer, str):
        return False
    alone = not _TIME_WORDS.sub(" ", answer).strip()
    return bool(_ASKS_TIME.search(question) or (alone and _ABOUT_TIME.search(question)))


def _read_pair(answer: Any) -> tuple[float, float] | None:
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        answer = " to ".join(map(str, answer)) if len(answer) == 2 else None
    if not isinstance(answer, str):
        return None
    pair = _BRACKETED_PAIR.match(answer)
    return protocol.read_span(f"{pair[1]} to {pair[2]}" if pair else answer)


def _short(fault: str) -> str:
    """A check's sentence without the row's own values, so that equal faults are counted together."""
    return re.sub(r"(['\"]).*\1 |\[.*\] ", "", fault)
