"""The grammar of a turn: what runs, what is read, what is only text."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.protocol import ToolCall, ToolError, missing_closers, over_cap, parse_turn, tag_spans
from paravt.rollout import Turn

FAST = settings(max_examples=150, deadline=None)
THINK = "<think>\nlook first\n</think>\n"


def call(start: float = 1.0, end: float = 2.5, **more) -> str:
    arguments = {"video_path": "v.mp4", "start_time": start, "end_time": end} | more
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def windows(turn: Turn) -> list[tuple]:
    return [(c.arguments["start_time"], c.arguments["end_time"]) for c in turn.valid_calls]


def messages(turn: Turn) -> list[str]:
    return [c.message for c in turn.calls if isinstance(c, ToolError)]


# --- think, calls, answer


def test_two_parallel_calls():
    turn = parse_turn(THINK + call(1, 2) + "\n" + call(3, 4))
    assert turn.think == "look first" and windows(turn) == [(1, 2), (3, 4)]
    assert turn.answer is None and turn.well_formed


def test_answer():
    turn = parse_turn(THINK + "<answer> B </answer>")
    assert turn.answer == "B" and turn.calls == () and turn.well_formed


def test_text_inside_a_closed_think_is_only_text():
    turn = parse_turn(f"<think>\nI could write {call()} or <answer>A</answer>\n</think>\n<answer>B</answer>")
    assert turn.calls == () and turn.answers == ("B",) and turn.well_formed


def test_calls_after_an_unclosed_think_run_but_the_turn_is_not_well_formed():
    turn = parse_turn(f"<think>\nlook {call()}")
    assert windows(turn) == [(1.0, 2.5)] and turn.think == "look"
    assert turn.think_opened and not turn.think_closed and not turn.well_formed


def test_an_answer_after_an_unclosed_think_is_read():
    turn = parse_turn("<think>\nit is a square <answer>B</answer>")
    assert turn.answer == "B" and not turn.well_formed


def test_a_call_beats_an_answer():
    turn = parse_turn(f"{THINK}<answer>A</answer>{call()}")
    assert len(turn.valid_calls) == 1 and turn.answer is None
    assert turn.answer_opened and turn.answers == ("A",) and not turn.well_formed


def test_even_a_malformed_call_beats_an_answer():
    turn = parse_turn(f"{THINK}<tool_call>crop</tool_call><answer>A</answer>")
    assert turn.answer is None and len(turn.calls) == 1 and turn.valid_calls == ()


def test_the_last_answer_block_is_read():
    turn = parse_turn(f"{THINK}<answer>A</answer> no <answer>B</answer>")
    assert turn.answer == "B" and turn.answers == ("A", "B") and not turn.well_formed


def test_an_empty_answer_is_an_answer_without_content():
    turn = parse_turn(f"{THINK}<answer> \n</answer>")
    assert turn.answer == "" and turn.answer_closed and not turn.well_formed


@pytest.mark.parametrize("text", ["", "B", "<think>\nhm\n</think>\nIt is B."])
def test_no_call_and_no_answer(text):
    turn = parse_turn(text)
    assert turn.calls == () and turn.answer is None and not turn.well_formed


def test_think_without_opener_closes_all_before_it():
    turn = parse_turn("sum is 4, <answer>no</answer></think>\n\n<answer>Four</answer>")
    assert turn.think == "sum is 4, <answer>no</answer>" and turn.answer == "Four"
    assert turn.think_closed and not turn.think_opened and not turn.well_formed


def test_a_repeated_opener_is_text_of_the_first_think():
    assert parse_turn("<think>\n<think>\nhm</think><answer>A</answer>").well_formed


def test_a_second_think_must_be_closed_too():
    assert parse_turn(f"{THINK}<think>more</think><answer>A</answer>").well_formed
    assert not parse_turn(f"{THINK}<answer>A</answer><think>more").well_formed


# --- missing tags


def test_unclosed_call_at_the_end_of_the_text_runs():
    turn = parse_turn(THINK + call().removesuffix("\n</tool_call>"))
    assert len(turn.valid_calls) == 1 and not turn.calls_closed and not turn.well_formed


def test_unclosed_call_before_the_next_call():
    turn = parse_turn(THINK + call(1, 2).removesuffix("</tool_call>") + call(3, 4))
    assert windows(turn) == [(1, 2), (3, 4)] and not turn.calls_closed


def test_text_after_an_unclosed_call_is_passed_over():
    turn = parse_turn(
        THINK + call().removesuffix("</tool_call>") + "Now I wait for (some) reports.<|im_end|>"
    )
    assert len(turn.calls) == 1 and len(turn.valid_calls) == 1


def test_wrong_closer_ends_the_call_but_does_not_close_it():
    turn = parse_turn(THINK + call().replace("</tool_call>", "</tool_code>"))
    assert len(turn.valid_calls) == 1 and not turn.calls_closed


def test_call_without_opener():
    turn = parse_turn(THINK + "First:\n" + call().removeprefix("<tool_call>\n"))
    assert len(turn.valid_calls) == 1 and not turn.calls_closed


def test_stray_closers_begin_nothing():
    turn = parse_turn(THINK + "</tool_call></tool_code> <answer>A</answer></answer></think>")
    assert turn.calls == () and turn.answers == ("A",) and turn.well_formed


@pytest.mark.parametrize("text", ["<answer>B", "B</answer>", "So:\nB</answer>"])
def test_answer_with_one_tag_is_read_but_not_closed(text):
    turn = parse_turn(THINK + text)
    assert turn.answer == "B" and turn.answer_opened and not turn.answer_closed and not turn.well_formed


def test_copied_response_tags_are_text():
    turn = parse_turn(f"{THINK}<tool_response>\nred square\n</tool_response><answer>B</answer>")
    assert turn.calls == () and turn.answer == "B"


# --- JSON calls


def test_one_bad_block_does_not_take_the_good_ones_along():
    turn = parse_turn(f"{THINK}{call(1, 2)}<tool_call>\n{{bad\n</tool_call>{call(3, 4)}")
    assert [type(c) for c in turn.calls] == [ToolCall, ToolError, ToolCall]
    assert windows(turn) == [(1, 2), (3, 4)] and "not valid JSON" in messages(turn)[0]


def test_unknown_tool_and_cap_are_answered_in_place():
    body = call(1, 2) + call(3, 4).replace("crop_video", "crop_vid") + call(5, 6)
    turn = parse_turn(THINK + body, max_calls=2)
    assert windows(turn) == [(1, 2)]
    assert messages(turn) == [
        "unknown tool crop_vid; available: crop_video",
        "not run: at most 2 calls a turn",
    ]
    assert [c.kind for c in turn.calls[1:]] == ["malformed", "over_cap"]


@pytest.mark.parametrize(
    "body, message",
    [
        ("", "empty call"),
        ("crop_video(1, 2)", "not valid JSON"),
        ("[1, 2]", "a call is a JSON object"),
        ('{"arguments": {}}', 'needs a "name"'),
        ('{"name": "crop_video"}', "arguments are not a JSON object"),
        ('{"name": "crop_video", "arguments": [1, 2]}', "arguments are not a JSON object"),
        ('{"name": "crop_video", "arguments": {"start_time": 1}}', "end_time is missing"),
        (
            '{"name": "crop_video", "arguments": {"start_time": NaN, "end_time": 2}}',
            "start_time must be a time",
        ),
        (
            '{"name": "crop_video", "arguments": {"start_time": true, "end_time": 2}}',
            "start_time must be a time",
        ),
        (
            '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 1e999}}',
            "end_time must be a time",
        ),
        (
            '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2, "num_frames": 0}}',
            "num_frames",
        ),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}}', "after the last brace"),
        ("[" * 5000, "not valid JSON"),
        ("x" * 9000, "call too long"),
    ],
)
def test_malformed_json(body, message):
    turn = parse_turn(f"{THINK}<tool_call>{body}</tool_call>")
    assert len(turn.calls) == 1 and message in turn.calls[0].message and turn.calls[0].kind == "malformed"


def test_tolerated_json():
    inner = (
        '{"name": "crop_video", "arguments": {"start": "1:30", "end": "95s", "num_frames": 99, "why": "x"}}'
    )
    expected = {"start_time": "1:30", "end_time": "95s", "num_frames": 99}
    for body in (inner, f"```json\n{inner}\n```", f"[{inner}]"):
        assert parse_turn(f"{THINK}<tool_call>{body}</tool_call>").valid_calls[0].arguments == expected
    as_text = json.dumps({"name": "crop_video", "arguments": '{"start_time": 1, "end_time": 2}'})
    assert windows(parse_turn(f"{THINK}<tool_call>{as_text}</tool_call>")) == [(1, 2)]


def test_several_objects_in_one_block():
    one = '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
    two = one.replace("1", "3").replace("2}", "4}")
    for body in (f"{one}\n{two}", f"[{one}, {two}]", f"{one}, {two}"):
        assert windows(parse_turn(f"{THINK}<tool_call>{body}</tool_call>")) == [(1, 2), (3, 4)]
    turn = parse_turn(f'{THINK}<tool_call>{{"name": "crop_video", oops}}\n{two}</tool_call>')
    assert [type(c) for c in turn.calls] == [ToolError, ToolCall]


def test_half_a_surrogate_pair_can_be_written_to_a_file():
    arguments = r'{"video_path": "\ud800", "start_time": "\udfff", "end_time": 2}'
    body = f'{{"name": "crop_video", "arguments": {arguments}}}'
    turn = parse_turn(f"{THINK}<tool_call>{body}</tool_call>")
    assert turn.valid_calls
    str(turn).encode("utf-8")


# --- Python calls


@pytest.mark.parametrize(
    "code",
    [
        "crop_video(video_path='v.mp4', start_time=3, end_time=7)",
        "crop_video('v.mp4', 3, 7)",
        "crop_video('v.mp4', 3, end_time=7)",
        "crop_video(3, 7)",
        "crop_video(start=3, end=7)",
        "crop_video(path, 3, 7)",
        "print(crop_video('v.mp4', 3, 7))",
        "result = tools.crop_video('v.mp4', 3, 7)",
        "[crop_video('v.mp4', 3, 7)]",
        "import tools\n# look\ncrop_video('v.mp4', 3, 7)\n",
        "```python\ncrop_video('v.mp4', 3, 7)\n```",
        "\"crop_video('v.mp4', 3, 7)\"",
        "crop_video('v.mp4', 3, 7)\"",
        'crop_video(video_path="v.mp4, start_time=3, end_time=7)',
        "`crop_video('v.mp4', 3, 7)`",
    ],
)
def test_python_call(code):
    turn = parse_turn(f"{THINK}<tool_code>\n{code}\n</tool_code>")
    assert windows(turn) == [(3, 7)] and len(turn.calls) == 1 and turn.valid_calls[0].style == "python"
    assert turn.well_formed


def test_python_times_as_text():
    for code in (
        "crop_video('v.mp4', '1:30', '1:45')",
        "crop_video('1:30', '1:45')",
        "crop_video(1:30, 1:45)",
    ):
        assert windows(parse_turn(f"<tool_code>{code}</tool_code>")) == [("1:30", "1:45")]


def test_several_python_calls_with_a_bad_line_between():
    turn = parse_turn(f"{THINK}<tool_code>crop_video(1, 2)\ncrop_video(3,\ncrop_video(5, 6)</tool_code>")
    assert [type(c) for c in turn.calls] == [ToolCall, ToolError, ToolCall]
    assert windows(turn) == [(1, 2), (5, 6)]


@pytest.mark.parametrize(
    "second",
    [
        '"crop_video(3, "',
        "both = {'a': crop_video(3, 4)}",
        "[crop_video(i, i + 4) for i in (3, 4)]",
        "crop_video(3, 4) or None",
    ],
)
def test_a_python_call_that_cannot_be_run_is_never_passed_over(second):
    turn = parse_turn(f"{THINK}<tool_code>crop_video(1, 2)\n{second}</tool_code>")
    assert [type(c) for c in turn.calls] == [ToolCall, ToolError]
    assert windows(turn) == [(1, 2)] and not turn.well_formed


@pytest.mark.parametrize(
    "code, message",
    [
        ("", "empty call"),
        ("x = 5", "no call in this block"),
        ("zoom(1, 2)", "unknown tool zoom; available: crop_video"),
        ("for i in range(3):\n    crop_video(i, 4)", "only plain calls are run"),
        ("crop_video(start_time=open('x'), end_time=2)", "plain values"),
        ("crop_video(**{'start_time': 1, 'end_time': 2})", "plain values"),
        ("crop_video('v', 1, 2, 3, 4)", "at most 4 arguments"),
        ("crop_video(1, 2, start_time=3)", "start_time is given twice"),
        ("crop_video('v.mp4', 1)", "end_time is missing"),
        ("crop_video(" * 3000, "call too long"),
        ("crop_video(" * 300, "not a valid Python call"),
        ("crop_video('a\x00', 1", "not a valid Python call"),
    ],
)
def test_malformed_python(code, message):
    turn = parse_turn(f"{THINK}<tool_code>{code}</tool_code>")
    assert len(turn.calls) == 1 and message in turn.calls[0].message


def test_python_and_json_keep_their_order():
    turn = parse_turn(
        f"{THINK}<tool_code>crop_video(1, 2)</tool_code>{call(3, 4)}<tool_code>crop_video(5, 6)"
    )
    assert windows(turn) == [(1, 2), (3, 4), (5, 6)]


# --- where the tags stand


def test_tag_spans_are_the_tags_of_the_blocks():
    text = f"<think>\nno <answer> here\n</think>\n{call()}\n</think></answer>"
    assert [(span.kind, text[span.start : span.end]) for span in tag_spans(text)] == [
        ("think", "<think>"),
        ("think", "</think>"),
        ("call", "<tool_call>"),
        ("call", "</tool_call>"),
    ]
    assert missing_closers(text) == []


def test_missing_closers_stand_where_the_block_ended():
    text = "<think>\nhm <tool_call>x<answer>B"
    spans = [(span.kind, text[: span.start]) for span in missing_closers(text)]
    assert spans == [("think", "<think>\nhm "), ("call", "<think>\nhm <tool_call>x"), ("answer", text)]
    assert all(span.start == span.end for span in missing_closers(text))


# --- properties

PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_code>",
        "</tool_code>",
        "<answer>",
        "</answer>",
    ]
    + ["<tool_response>", "</tool_response>", "<think>\n", "\n", "B", "crop_video(", "crop_video(1, 2)"]
    + ['{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}', "print(", ")", "'", '"']
    + ["{", "}", "[", "]", "```json\n", "```", "<|im_end|>", "\\", "\x00", "\ud800", "٣", "3 to 7"]
)
MESSES = st.lists(PIECES | st.text(max_size=8), max_size=25).map("".join)


@FAST
@given(MESSES, st.integers(0, 6))
def test_parser_takes_any_text_and_gives_the_same_turn_again(text, max_calls):
    turn = parse_turn(text, max_calls)
    assert turn == parse_turn(text, max_calls)
    assert all(isinstance(c, ToolCall | ToolError) for c in turn.calls)
    assert len(turn.valid_calls) <= max_calls
    assert turn.answer is None or (not turn.calls and turn.answer == turn.answers[-1])
    assert all(c == ToolError(over_cap(max_calls), "over_cap") for c in turn.calls[max_calls:])
    spans = tag_spans(text)
    assert all(text[s.start : s.end].startswith("<") for s in spans)
    assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
    for c in turn.valid_calls:
        assert json.loads(json.dumps(c.arguments)) == c.arguments


GOOD = st.tuples(st.integers(0, 50), st.integers(51, 99)).map(lambda w: (w, call(*w)))
CODE = st.tuples(st.integers(0, 50), st.integers(51, 99)).map(
    lambda w: (w, f"<tool_code>crop_video({w[0]}, {w[1]})</tool_code>")
)
BAD = st.sampled_from(["", "{", "null", '{"name": 3}', "prose"]).map(
    lambda body: (None, f"<tool_call>{body}</tool_call>")
)


@FAST
@given(st.lists(GOOD | CODE | BAD, max_size=7), st.booleans())
def test_one_outcome_per_call_in_order(blocks, closed):
    think = THINK if closed else "<think>\nlook first\n"
    turn = parse_turn(think + "\n".join(text for _, text in blocks), max_calls=7)
    found = [
        (c.arguments["start_time"], c.arguments["end_time"]) if isinstance(c, ToolCall) else None
        for c in turn.calls
    ]
    assert found == [window for window, _ in blocks]
    assert turn.think_closed == closed


@FAST
@given(MESSES)
def test_what_a_closed_think_holds_changes_nothing(inside):
    inside = inside.replace("</think>", "")
    turn, plain = (parse_turn(f"<think>{body}</think>{call()}") for body in (inside, "x"))
    assert turn.calls == plain.calls and turn.answers == plain.answers
    assert turn.well_formed == bool(turn.think)


@FAST
@given(MESSES)
def test_reading_a_turn_written_again_from_its_parts_gives_the_parts(text):
    """Idempotent: what the parser understood, written in the one good format, is understood the same way."""
    turn = parse_turn(text)
    parts = [f"<think>{turn.think.replace('</think>', '')}</think>" if turn.think is not None else ""]
    for c in turn.valid_calls:
        parts.append(f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>")
    if turn.answer is not None:
        parts.append(f"<answer>{turn.answer}</answer>")
    again = parse_turn("".join(parts))
    assert [c.arguments for c in again.calls] == [c.arguments for c in turn.valid_calls]
    assert again.answer == turn.answer
