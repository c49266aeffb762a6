"""Tables: how rows are read, what a frame makes of missing fields, and each check with its sentence."""

from __future__ import annotations

import json

import pytest

from paravt.data import checks
from paravt.data.checks import OK
from paravt.data.schema import (
    Row,
    TableError,
    TraceRow,
    VideoFacts,
    question_frame,
    read_rows,
    read_traces,
    trace_frame,
)

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 2.0, "end_time": 8.0}}\n</tool_call>'
DISPATCH = f"find red\n0.0 red\n</think>\n{CALL}"
ANSWER = "red circle\nA circle yes\n</think>\n<answer>A</answer>"
VIDEOS = {"a.mp4": VideoFacts(duration_s=20.0)}


def question(**changes) -> dict:
    row = {
        "id": "q1",
        "video": "a.mp4",
        "question": "Which shape?",
        "answer": "A",
        "question_type": "mcq",
        "options": ["circle", "square"],
        "meta": {"duration_s": 20.0},
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def trace(**changes) -> dict:
    row = {
        "id": "t1",
        "sample": question(),
        "frame_budget": 4,
        "kind": "main",
        "turns": [
            {"role": "assistant", "text": DISPATCH},
            {"role": "tool", "results": ["2.0 red circle starts red 2.0"]},
            {"role": "assistant", "text": ANSWER},
        ],
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def report(**changes) -> dict:
    turns = [{"role": "assistant", "text": "2.0 red circle"}]
    return trace(**({"id": "t1-crop0", "kind": "subagent", "window_s": [2.0, 8.0], "turns": turns} | changes))


def rows(*data: dict) -> list[Row]:
    return [Row(number, item) for number, item in enumerate(data, 1)]


def write(path, *lines) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_rows_keep_their_line_and_pass_blank_lines(tmp_path):
    path = write(tmp_path / "t.jsonl", json.dumps(question()), "", json.dumps(question(id=7)))
    found = read_rows(path)
    assert [(row.line, row.name) for row in found] == [(1, "q1 (line 1)"), (3, "line 3")]


@pytest.mark.parametrize(
    "line, words",
    [("{broken", ":2: not JSON"), ("[1, 2]", ":2: a list, not a JSON object"), ("7", ":2: a int")],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, words):
    path = write(tmp_path / "t.jsonl", json.dumps(question()), line)
    with pytest.raises(TableError, match=words):
        read_rows(path)


def test_a_missing_table_and_bad_bytes_are_named(tmp_path):
    with pytest.raises(TableError, match="no such table"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(TableError, match="not UTF-8"):
        read_rows(tmp_path / "bytes.jsonl")


def test_traces_come_back_as_they_were(tmp_path):
    path = write(tmp_path / "sft.jsonl", json.dumps(trace()), json.dumps(report()))
    main, crop = read_traces(path)
    assert main.window_s is None and crop.window_s == (2.0, 8.0)
    assert main.turns[1].results == ("2.0 red circle starts red 2.0",)
    again = [TraceRow.from_json(json.loads(json.dumps(item.to_json()))) for item in (main, crop)]
    assert again == [main, crop]
    path = write(tmp_path / "bad.jsonl", json.dumps(trace()), json.dumps(trace(kind=...)))
    with pytest.raises(TableError, match=":2: not a trace .KeyError: 'kind'"):
        read_traces(path)


@pytest.mark.parametrize(
    "question_type, answer, options, words",
    [
        ("mcq", "B", ["x", "y"], OK),
        ("mcq", "C", ["x", "y"], "answer 'C' is not a letter of its 2 options"),
        ("mcq", "a", ["x", "y"], "answer 'a' is not a letter of its 2 options"),
        ("mcq", "AB", ["x", "y"], "answer 'AB' is not a letter of its 2 options"),
        ("mcq", "", ["x", "y"], "answer '' is not a letter of its 2 options"),
        ("mcq", 0, ["x", "y"], "answer 0 is not a letter of its 2 options"),
        ("mcq", "A", ["x"], "a choice needs at least 2 options"),
        ("mcq", "A", None, "a choice needs at least 2 options"),
        ("mcq", "A", ["x", "x"], "two options are equal"),
        ("mcq", "A", ["x", " "], "an option is empty or not a text"),
        ("tvg", [1, 2.5], (), OK),
        ("tvg", [2, 2], (), OK),
        ("tvg", [3, 2], (), "answer [3, 2] is not a span of two times in seconds, start first"),
        ("tvg", "3 to 4", (), "answer '3 to 4' is not a span of two times in seconds, start first"),
        ("tvg", [1, float("nan")], (), "answer [1, nan] is not a span of two times in seconds, start first"),
        ("tvg", [True, 2], (), "answer [True, 2] is not a span of two times in seconds, start first"),
        ("oe", "a circle", (), OK),
        ("oe", " ", (), "answer ' ' is not a text"),
        ("yesno", "yes", (), "question_type 'yesno' is none of mcq, tvg, oe"),
    ],
)
def test_answers_fit_their_type(question_type, answer, options, words):
    assert checks.check_answer(question_type, answer, options) == words


@pytest.mark.parametrize(
    "span, words",
    [
        ([0, 20], OK),
        ([0, 20.0000001], OK),
        ([0, 20.1], "span 0 to 20.1 s leaves the video of 20 s"),
        ([-1, 3], "span -1 to 3 s leaves the video of 20 s"),
        ([], "[] is not a span of two times in seconds, start first"),
    ],
)
def test_spans_stay_inside_the_video(span, words):
    assert checks.check_span(span, 20.0) == words


@pytest.mark.parametrize(
    "kind, roles, good",
    [
        ("main", ["assistant"], True),
        ("main", ["assistant", "tool", "assistant"], True),
        ("main", ["assistant", "tool"], False),
        ("main", ["tool", "assistant"], False),
        ("main", ["assistant", "assistant"], False),
        ("main", ["user"], False),
        ("subagent", ["assistant"], True),
        ("subagent", ["assistant", "tool", "assistant"], False),
        ("main", [], False),
    ],
)
def test_roles_are_in_order(kind, roles, good):
    assert (checks.check_roles(kind, [{"role": role} for role in roles]) == OK) is good


def with_turn(number: int, **changes) -> list[dict]:
    turns = [dict(turn) for turn in trace()["turns"]]
    turns[number] |= changes
    return turns


@pytest.mark.parametrize(
    "turns, words",
    [
        (with_turn(0), OK),
        ([{"role": "assistant", "text": ANSWER}], OK),
        ([{"role": "assistant", "text": "<think>\n" + ANSWER}], OK),
        (
            with_turn(2, text="look</think>\nA"),
            "turn 3 is not well formed: no answer block",
        ),
        (with_turn(2, text="<answer>A</answer>"), "turn 3 is not well formed: think not closed"),
        (with_turn(2, text="</think><answer>A</answer>"), "turn 3 is not well formed: think is empty"),
        (with_turn(2, text="look</think><answer>A"), "turn 3 is not well formed: answer not closed"),
        (with_turn(2, text="look</think><answer> </answer>"), "turn 3 is not well formed: answer is empty"),
        (with_turn(2, text=DISPATCH), "turn 3 ends the trace with calls"),
        (with_turn(0, text=ANSWER), "turn 1 answers before the end"),
        (with_turn(0, text=DISPATCH[:-12]), "turn 1 is not well formed: call not closed"),
        (with_turn(0, text=f"{DISPATCH}\n{CALL}"), "turn 1 has 2 calls and 1 results"),
        (
            with_turn(0, text=f"{DISPATCH}<answer>A</answer>"),
            "turn 1 is not well formed: answer beside a call",
        ),
        (
            with_turn(0, text="look</think><tool_call>{}</tool_call>"),
            'turn 1 is not well formed: a call needs a "name" and "arguments"',
        ),
        (with_turn(1, results=[]), "turn 1 has 1 calls and 0 results"),
        (with_turn(1, results=[" "]), "turn 2 has an empty or missing text"),
        (with_turn(2, text=None), "turn 3 has an empty or missing text"),
        (with_turn(2, text="<|im_end|>" + ANSWER), "turn 3 holds the control token <|im_end|>"),
    ],
)
def test_each_target_parses_with_the_one_parser(turns, words):
    assert checks.check_targets("main", turns) == words


def test_a_report_is_plain_text():
    turns = [{"role": "assistant", "text": "2.0 red\n<answer>A</answer>"}]
    assert checks.check_targets("subagent", turns) == "a report holds tags of the turn grammar"
    assert checks.check_targets("subagent", report()["turns"]) == OK


def test_windows_of_calls_and_crops_lie_inside_the_video():
    turns = trace()["turns"]
    assert checks.check_windows("main", turns, (), 20.0) == OK
    assert checks.check_windows("main", turns, (), 7.0) == "call 2.0 to 8.0 leaves the video of 7 s"
    assert checks.check_windows("main", turns, (), 1.0).startswith("call 2.0 to 8.0")
    assert checks.check_windows("subagent", [], [2.0, 8.0], 7.0) == "span 2 to 8 s leaves the video of 7 s"
    assert checks.check_windows("subagent", [], (), 7.0).startswith("() is not a span")


def test_a_trace_agrees_with_its_question():
    assert checks.check_agreement("main", trace()["turns"], question()) == OK
    other = checks.check_agreement("main", trace()["turns"], question(answer="B"))
    assert other == "the trace answers 'A', the question's answer is 'B'"
    when = question(question_type="tvg", answer=[3.0, 5.0], options=[])
    turns = with_turn(2, text="there</think><answer>4.0 to 6.0</answer>")
    assert checks.check_agreement("main", turns, when) == OK
    apart = with_turn(2, text="there</think><answer>14.0 to 16.0</answer>")
    assert checks.check_agreement("main", apart, when).startswith("the trace answers (14.0, 16.0)")


def test_a_frame_has_a_column_per_field_and_check():
    frame = question_frame(rows(question(), question(id="q2", answer="C")), VIDEOS)
    assert list(frame["row"]) == ["q1 (line 1)", "q2 (line 2)"]
    assert list(frame["answer_check"]) == [OK, "answer 'C' is not a letter of its 2 options"]
    assert list(frame["video_check"]) == [OK, OK]
    assert list(frame["span_check"]) == [OK, OK]
    assert frame["id"].dtype == "str"


def test_a_field_that_no_row_has_gives_no_column_and_no_check():
    frame = question_frame(rows(question(answer=...), question(id="q2", answer=...)), VIDEOS)
    assert "answer" not in frame and "answer_check" not in frame and "span_check" not in frame
    assert "video_check" in frame


def test_a_field_that_one_row_lacks_is_null_there():
    frame = question_frame(rows(question(), question(id="q2", answer=...)), VIDEOS)
    assert frame["answer"].isna().tolist() == [False, True]
    assert frame["answer_check"].isna().tolist() == [False, True]


def test_an_empty_table_has_its_columns():
    frame = question_frame([], {})
    assert len(frame) == 0 and {"id", "answer", "duration_s", "answer_check"} <= set(frame.columns)


def test_a_null_keeps_a_whole_number_column_whole():
    frame = trace_frame(rows(trace(), trace(id="t2", frame_budget=None)), VIDEOS)
    assert str(frame["frame_budget"].dtype) == "Int64"
    assert frame["frame_budget"].isna().tolist() == [False, True]
    mixed = trace_frame(rows(trace(), trace(id="t2", frame_budget="8")), VIDEOS)
    assert str(mixed["frame_budget"].dtype) == "object"


def test_a_trace_frame_judges_trace_and_question():
    bad = trace(id="t2", sample=question(answer="B"))
    frame = trace_frame(rows(trace(), report(), bad), VIDEOS)
    assert list(frame["target_check"]) == [OK, OK, OK]
    assert list(frame["window_check"]) == [OK, OK, OK]
    assert list(frame["agreement_check"])[:2] == [OK, OK]
    assert "question's answer is 'B'" in frame["agreement_check"][2]
    assert list(frame["sample.video_check"]) == [OK, OK, OK]
    no_window = trace_frame(rows(report(window_s=...)), VIDEOS)
    assert no_window["window_check"][0].startswith("() is not a span")


def test_videos_are_judged_by_what_opening_gave():
    videos = {
        "a.mp4": VideoFacts(duration_s=12.0),
        "b.mp4": VideoFacts(problem="empty: b.mp4: the file is empty"),
    }
    frame = question_frame(
        rows(question(), question(id="q2", video="b.mp4"), question(video="c.mp4")), videos
    )
    assert list(frame["video_check"]) == [OK, "empty: b.mp4: the file is empty", "'c.mp4' was not opened"]
    assert frame["duration_check"][0] == "the file lasts 12.00 s, the table says 20.00 s"
