"""Ten thousand cases for each reader: no text makes one raise, and what it gives obeys its rules.

Texts are made of pieces that models write, so that most cases come close to an answer and break it
somewhere.
"""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paravt.benchmarks.subtitles import read_srt
from paravt.protocol import TOOL_NAME, parse_turn, read_choice, read_span
from paravt.protocol.dialects import DIALECTS
from paravt.rollout import LETTERS, ToolCall, ToolError
from paravt.times import TimeError, parse_time, parse_window

CASES = 10_000
PER_DRAW = 20  # cases of one drawn example: drawing costs more than reading
MANY = settings(
    max_examples=CASES // PER_DRAW,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


NOISE = ["", "", "", "x", "\x00", "\ud800", "é", "\u2028", "<", "7"]


def texts_of(pieces: list[str], longest: int = 8) -> st.SearchStrategy[list[str]]:
    """PER_DRAW texts of up to `longest` pieces. One byte stands for one piece: bytes are drawn quickly."""
    choice = [*pieces, *NOISE]

    def compose(data: bytes) -> list[str]:
        parts = [choice[byte % len(choice)] for byte in data]
        return ["".join(parts[start : start + longest]) for start in range(0, len(parts), longest)]

    return st.binary(min_size=PER_DRAW * longest, max_size=PER_DRAW * longest).map(compose)


CALLS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>", "<answer>"]
CALLS += [
    "</answer>",
    '{"name": "crop_video", "arguments": ',
    '{"start_time": 1, "end_time": 2}',
    "}",
    "{",
    "]",
]
CALLS += [
    "crop_video(1, 2)",
    "crop_video(start=",
    "print(",
    ")",
    "```json\n",
    "\n```",
    "B",
    "\n",
    '"',
    "<|im_end|>",
]
CALLS += [
    "<video_zoom>",
    '{"segment": [1, 2]}',
    "</video_zoom>",
    "<clip>",
    "00:01-00:02",
    "</clip>",
    "<json>",
]
CALLS += ['{"final_answer": ', "null", '"recommended_tools": {"tool_calls": [', "\\boxed{", "NaN", "1e999"]


@MANY
@given(texts_of(CALLS, 12), st.sampled_from(sorted(DIALECTS)), st.integers(1, 5))
def test_calls(texts, dialect, cap):
    for text in texts:
        for spoken in ("paravt", dialect):
            turn = parse_turn(text, cap, spoken)
            assert all(isinstance(call, ToolCall | ToolError) for call in turn.calls)
            assert sum(getattr(call, "kind", "") != "over_cap" for call in turn.calls) <= cap
            assert turn.answer is None or not turn.calls, "a call beats an answer"
            assert turn == parse_turn(text, cap, spoken)
            for call in turn.valid_calls:
                assert call.name == TOOL_NAME and {"start_time", "end_time"} <= set(call.arguments)
                try:  # whatever its times are, they are a window or words for the model
                    window = parse_window(call.arguments["start_time"], call.arguments["end_time"], 30.0)
                except TimeError as error:
                    assert "<" not in str(error)
                else:
                    assert 0 <= window.start_s < window.end_s <= 30.0
        hidden = parse_turn(f"<think>{text.replace('</think>', '')}</think>")
        assert not hidden.calls and hidden.answer is None, "nothing in a closed think is run or read"


CHOICES = [
    *LETTERS,
    *LETTERS.lower(),
    "(",
    ")",
    ".",
    ":",
    ",",
    " ",
    "answer is ",
    "option ",
    "not ",
    " or ",
    " and ",
]
CHOICES += [
    "circle",
    "square",
    "Vitamin C",
    "a man",
    "I",
    "\\boxed{",
    "}",
    "**",
    "/",
    "-",
    "'",
    "\n",
    "２",
    "Ａ",
]


@MANY
@given(
    texts_of(CHOICES), st.lists(st.sampled_from(["circle", "square", "a man", "B", "A. x", ""]), max_size=6)
)
def test_choices(texts, options):
    offered = LETTERS[: len(options)] if options else LETTERS
    for text in texts:
        choice = read_choice(text, options)
        assert choice is None or choice in offered
        assert choice is None or read_choice(choice, options) == choice, "a letter names itself"
        assert read_choice(f"  {text}\n", options) == choice, "blanks around it change nothing"
        if len(options) > 1:
            every = " ".join(f"({letter})" for letter in offered)
            assert read_choice(every, options) is None, "listing every option is no choice"


SPANS = [
    "12.5",
    "17.8",
    "3",
    "0",
    "99",
    "1:30",
    "00:01:45",
    "-",
    "–",
    " to ",
    " and ",
    "between ",
    "[",
    "]",
    ", ",
]
SPANS += [
    "start",
    "end",
    ": ",
    " s",
    " seconds",
    " min",
    "minute ",
    "from ",
    ".",
    "\n",
    "-->",
    "９",
    "e9",
    "nan",
    "²",
]


@MANY
@given(texts_of(SPANS))
def test_spans(texts):
    for text in texts:
        span = read_span(text)
        if span is not None:
            start_s, end_s = span
            assert 0 <= start_s <= end_s < math.inf
            assert read_span(f"{start_s!r} to {end_s!r}") == span or end_s >= 1e16, "a span reads as itself"
        assert read_span(f" {text} ") == span


TIMES = [
    "1",
    "30",
    ":",
    "00:",
    ".5",
    "s",
    " seconds",
    "<",
    ">",
    "-",
    "+",
    "e5",
    "inf",
    "nan",
    " ",
    "٣",
    "０",
    "_",
]


@MANY
@given(
    texts_of(TIMES, 6),
    st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.lists(st.integers(), max_size=2)),
    st.floats(0.1, 1e5),
)
def test_times(texts, other, duration_s):
    for value in [*texts, other]:
        try:
            time_s = parse_time(value)
        except TimeError as error:
            assert str(error) and "\n" not in str(error) and "<" not in str(error)
        else:
            assert math.isfinite(time_s) and time_s >= 0 and math.copysign(1, time_s) == 1
            assert parse_time(time_s) == time_s
    for start, end in zip(texts, [*texts[1:], other], strict=True):
        try:
            window = parse_window(start, end, duration_s)
        except TimeError:
            continue
        assert 0 <= window.start_s < window.end_s <= duration_s
        assert bool(window.note) == window.clamped


CUES = ["1\n", "2\n", "00:00:01,000", " --> ", "00:00:02,500", "\n", "\r\n", "\n\n", "word", "<b>", "</font>"]
CUES += [
    "{\\an8}",
    "&amp;",
    "99:99:99,999",
    "00:01.5",
    "-->",
    "\ufeff",
    "\u2028",
    "٣",
    "0:0:0,0 --> 0:0:9,9\nx\n",
]


@MANY
@given(texts_of(CUES, 14))
def test_srt(texts):
    for text in texts:
        lines = read_srt(text)
        for line in lines:
            assert 0 <= line.start_s <= line.end_s < math.inf
            assert line.text and line.text == " ".join(line.text.split())
        assert lines == sorted(lines, key=lambda line: (line.start_s, line.end_s)), "in order of time"
        assert all(a.text != b.text for a, b in zip(lines, lines[1:], strict=False)), "repeats are one line"
