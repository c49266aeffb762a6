"""Scoring rollouts that were made elsewhere."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.config import RewardConfig
from paravt.scoring import ScoringError, score_file, score_row

THINK = "<think>\nlook first\n</think>\n"
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n</tool_call>'
MCQ = {
    "question_type": "mcq",
    "answer": "B",
    "options": ["circle", "square"],
    "assistant_turns": [THINK + CALL, THINK + "<answer>square</answer>"],
    "executed": [1, 0],
}


def write(tmp_path, *lines) -> str:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return str(path)


def test_each_question_type(tmp_path):
    tvg = MCQ | {
        "question_type": "tvg",
        "answer": [3, 7],
        "options": [],
        "assistant_turns": [THINK + "<answer>5 to 9</answer>"],
        "executed": [0],
    }
    oe = tvg | {
        "question_type": "oe",
        "answer": "red square",
        "assistant_turns": ["<think>\nhm\n<answer>square"],
    }
    rows = list(score_file(write(tmp_path, MCQ, "", tvg, oe)))
    assert [list(row) for row in rows] == [["accuracy", "format", "tool", "sites", "total", "reasons"]] * 3
    assert [row["accuracy"] for row in rows] == pytest.approx([1.0, 1 / 3, 2 / 3])
    assert [row["format"] for row in rows] == [1.0, 1.0, 0.0]
    assert [row["total"] for row in rows] == pytest.approx([2.8, 4 / 3, 2 / 3])
    assert rows[0]["sites"][1] == {"kind": "call", "turn": 0, "ok": True, "reason": None}
    assert rows[1]["reasons"] == ["tool: no call ran"]
    assert json.loads(json.dumps(rows)) == rows


def test_what_ran_is_what_executed_says():
    assert score_row(MCQ | {"executed": [0, 0]})["tool"] == 0.0
    assert score_row(MCQ | {"executed": [7, 0]})["tool"] == 0.8


def test_mcq_without_options_takes_the_letters_a_to_j():
    row = MCQ | {
        "options": [],
        "answer": "J",
        "assistant_turns": [THINK + "<answer>(J)</answer>"],
        "executed": [0],
    }
    assert score_row(row)["accuracy"] == 1.0
    assert score_row(row | {"assistant_turns": [THINK + "<answer>A man</answer>"]})["accuracy"] == 0.0
    assert score_row(row | {"options": None})["accuracy"] == 1.0
    no_options = {key: value for key, value in row.items() if key != "options"}
    assert score_row(no_options)["accuracy"] == 1.0


def test_variants_are_selectable(tmp_path):
    config = RewardConfig(tool="published", format="published_vanilla")
    row = next(score_file(write(tmp_path, MCQ | {"executed": [0, 0]}), config))
    assert (row["format"], row["tool"], row["total"]) == pytest.approx((1.0, 0.6, 2.6))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"question_type": "open"}, "question_type is 'open'; use mcq, tvg or oe"),
        ({"question_type": ["mcq"]}, "use mcq, tvg or oe"),
        ({"answer": "C"}, "answer 'C' is not a letter of its 2 options"),
        ({"answer": "square"}, "answer 'square' is not a letter"),
        ({"answer": 1}, "an mcq answer is a text"),
        ({"options": "AB"}, "options must be a list of texts"),
        ({"options": [1, 2]}, "options must be a list of texts"),
        ({"options": ["x"] * 11}, "11 options; 10 at most"),
        ({"options": [], "answer": "K"}, "answer 'K' is not a letter"),
        ({"question_type": "tvg"}, "a tvg answer is [start_s, end_s]"),
        ({"question_type": "tvg", "answer": [7, 3]}, "a tvg answer is [start_s, end_s]"),
        ({"question_type": "tvg", "answer": [1]}, "a tvg answer is [start_s, end_s]"),
        ({"question_type": "tvg", "answer": [0, float("nan")]}, "a tvg answer is [start_s, end_s]"),
        ({"question_type": "oe", "answer": None}, "an oe answer is a text"),
        ({"assistant_turns": []}, "assistant_turns must be a list of texts, one or more"),
        ({"assistant_turns": "text"}, "assistant_turns must be a list of texts"),
        ({"executed": [1]}, "executed must be a list of 2 counts, one for each turn"),
        ({"executed": [1, -1]}, "executed must be a list of 2 counts"),
        ({"executed": [True, 0]}, "executed must be a list of 2 counts"),
        ({"executed": [10**12, 0]}, "executed must be a list of 2 counts"),
    ],
)
def test_bad_values_are_refused_with_file_and_line(tmp_path, change, message):
    path = write(tmp_path, MCQ, MCQ | change)
    rows = score_file(path)
    assert next(rows)["accuracy"] == 1.0
    with pytest.raises(ScoringError) as error:
        next(rows)
    assert str(error.value).startswith(f"{path}:2: ") and message in str(error.value)


@pytest.mark.parametrize("name", ["question_type", "answer", "assistant_turns", "executed"])
def test_a_missing_field_is_named(tmp_path, name):
    path = write(tmp_path, {key: value for key, value in MCQ.items() if key != name})
    with pytest.raises(ScoringError, match=f":1: field {name} is missing"):
        list(score_file(path))


@pytest.mark.parametrize("line", ["{", "[1]", "3", "null", "[" * 100_000])
def test_a_line_that_is_no_object(tmp_path, line):
    with pytest.raises(ScoringError, match=":1: not a JSON object"):
        list(score_file(write(tmp_path, line)))


def test_a_file_without_rollouts(tmp_path):
    with pytest.raises(ScoringError, match="holds no rollout"):
        list(score_file(write(tmp_path, "", " ")))
    with pytest.raises(ScoringError, match=r"nothing\.jsonl: cannot be read \(No such file"):
        list(score_file(tmp_path / "nothing.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"answer": "\xe9"}')
    with pytest.raises(ScoringError, match="not UTF-8"):
        list(score_file(tmp_path / "latin.jsonl"))


def test_a_text_span_as_gold():
    row = MCQ | {"question_type": "tvg", "answer": "3 to 7", "options": []}
    assert (
        score_row(row | {"assistant_turns": [THINK + "<answer>3-7</answer>"], "executed": [0]})["accuracy"]
        == 1.0
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=3), st.data())
def test_any_turns_get_a_reward(texts, data):
    executed = data.draw(st.lists(st.integers(0, 6), min_size=len(texts), max_size=len(texts)))
    row = score_row(MCQ | {"assistant_turns": texts, "executed": executed})
    assert 0 <= row["total"] <= 2.8
