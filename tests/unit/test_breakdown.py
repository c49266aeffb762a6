"""Figures of a finished benchmark, two runs paired, and the page beside the published table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paravt.benchmarks.breakdown import by_group, describe, detail_lines, table_row, tool_use
from paravt.benchmarks.pairing import pair, pairing_line
from paravt.benchmarks.published import COLUMNS, TABLE, differences, markdown
from paravt.benchmarks.registry import Benchmark, Questions
from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import macro_interval


def result(number: int, score: float | None = 1.0, kind: str = "mcq", **fields) -> Result:
    status = "answered" if score is not None else "failed"
    reason = None if score is not None else "reset"
    base = Result(f"k{number}", f"q{number}", kind, 4, 0.0, status, reason, score, question=f"h{number}")
    return replace(base, **fields)


def test_micro_and_macro():
    """Kind a: 3 of 4 right; kind b: 0 of 1; micro 3/5, macro (3/4 + 0) / 2."""
    rows = [result(i, float(i < 3), groups={"task": "a"}) for i in range(4)]
    rows += [result(4, 0.0, groups={"task": "b"})]
    found = describe(Benchmark("x", lambda place: None, by=("task",), macro="task"), rows)
    assert found["headline"]["strict"] == 0.6
    assert found["macro"]["strict"] == 0.375 and found["macro"]["groups"] == 2 and found["macro"]["n"] == 5
    assert found["by"]["task"]["a"]["strict"] == 0.75 and found["by"]["task"]["b"]["counts"]["asked"] == 1
    assert 0.0 <= found["macro"]["low"] < 0.375 < found["macro"]["high"] <= 0.5, "group b has no spread"


def test_macro_interval():
    assert macro_interval([[1.0, 1.0], [0.0]]).to_json() == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 3}
    assert macro_interval([[], []]).mean is None
    with pytest.raises(ValueError, match="missing"):
        macro_interval([[float("nan")]])


def test_spans_have_iou_and_recall():
    rows = [result(i, score, "tvg") for i, score in enumerate((0.3, 0.5, 0.7, 1.0))]
    rows += [result(4, 0.0, "tvg", status="unparsed", reason="no answer"), result(5, None, "tvg")]
    found = describe(Benchmark("x", lambda place: None), rows)
    assert found["measure"] == "mIoU" and found["headline"]["strict"] == pytest.approx(2.5 / 6)
    assert found["headline"]["answered"] == pytest.approx(2.5 / 4)
    assert found["recall"] == {
        "0.3": pytest.approx(4 / 6),
        "0.5": pytest.approx(0.5),
        "0.7": pytest.approx(2 / 6),
    }


def test_a_headline_over_choices():
    rows = [result(0), result(1, 0.0), result(2, 0.4, "oe")]
    found = describe(Benchmark("x", lambda place: None, headline="mcq"), rows)
    assert found["headline"]["strict"] == 0.5 and found["headline"]["n"] == 2 and found["over"] == "choices"
    assert found["all"]["n"] == 3 and found["all"]["strict"] == pytest.approx(1.4 / 3)
    assert "recall" not in found and "macro" not in found


def test_groups_are_in_their_natural_order():
    groups = ["long", "short", "medium", "3600 s", "15 s", "600 s", "art"]
    rows = [result(i, groups={"g": group}) for i, group in enumerate(groups)]
    rows.append(result(9, groups={"g": ["art", "short"]}))
    found = by_group(rows, "g")
    assert list(found) == ["short", "medium", "long", "15 s", "600 s", "3600 s", "art"]
    assert len(found["art"]) == len(found["short"]) == 2 and by_group(rows, "none") == {}


def test_how_the_tool_was_used():
    rows = [
        result(0, calls=2, tools={"turns": 2, "ok": 2, "clamped": 1}),
        result(1, 0.0, calls=0, tools={"turns": 3, "malformed": 1, "error": 1, "forced": 1}),
        result(2, None),
    ]
    assert tool_use(rows) == {
        "episodes": 2,
        "share_with_calls": 0.5,
        "calls_per_question": 1.0,
        "calls_by_outcome": {"error": 1, "malformed": 1, "ok": 2},
        "windows_cut_to_the_video": 1,
        "answers_asked_for": 1,
        "turns_per_question": 2.5,
        "accuracy_with_calls": 1.0,
        "accuracy_without_calls": 0.0,
    }
    assert tool_use(rows[2:]) == {"episodes": 0}


def test_what_is_printed():
    rows = [result(0), result(1, None), result(2, None, status="skipped", reason="no video")]
    found = describe(
        Benchmark("x", lambda place: None, published_rows=9), rows, Questions([], 4, {"r": "bad"})
    )
    assert table_row(found) == ("x", "33.3", "0.0-100.0", "100.0", "3", "0", "1", "1", "0.00")
    text = "\n".join(detail_lines(found))
    assert "1 x reset" in text and "1 rows of the table are no question" in text and "published one 9" in text
    nothing = describe(Benchmark("x", lambda place: None), [])
    assert nothing["headline"]["strict"] is None and table_row(nothing)[1] == "-"


# --- pairing


def test_the_same_questions_are_paired():
    first = [result(i, float(i % 2)) for i in range(40)] + [result(90)]
    second = [result(i, 1.0 if i < 38 else 0.0) for i in range(40)] + [result(91)]
    found = pair(first, second)
    assert (found.better, found.worse, found.equal) == (19, 1, 20)
    assert found.difference.mean == pytest.approx(18 / 40) and found.difference.clear
    assert (found.only_first, found.only_second, found.changed) == (1, 1, 0)
    back = pair(second, first)
    assert back.difference.mean == pytest.approx(-found.difference.mean) and back.better == 1
    same = pair(first, first).difference
    assert (same.mean, same.low, same.high, same.clear) == (0.0, 0.0, 0.0, False)


def test_what_cannot_be_paired_is_left_out_and_told():
    first = [result(0), result(1), result(2)]
    second = [result(0), result(1, question="another"), result(3, 0.0)]
    found = pair(first, second)
    assert found.changed == 1 and found.difference.questions == 1
    line = pairing_line("x", found)
    assert (
        "1 only in the first, 1 only in the second, 1 not the same question" in line and "not clear" in line
    )
    assert pair(first, []).difference is None and "no question in common" in pairing_line(
        "x", pair(first, [])
    )
    failed = pair([result(0)], [result(0, None)])
    assert failed.difference.mean == -1.0, "a failure counts as 0 in both accuracies' strict form"
    with pytest.raises(ValueError, match="holds a question twice"):
        pair([result(0), result(0)], second)


# --- the published table


def test_the_published_table_is_whole():
    rows = {model: dict(zip(COLUMNS, values, strict=True)) for model, _, values in TABLE}
    assert len(rows) == 15 and all(len(values) == 7 for values in rows.values())
    base, ours = rows["Qwen3-VL-8B (tool)"], rows["ParaVT-8B"]
    relative = [100 * (ours[name] / base[name] - 1) for name in COLUMNS]
    assert sum(relative) / 7 == pytest.approx(7.87, abs=0.01), "the gain that the paper's abstract states"


def asked(**changes) -> dict:
    episode = {"mode": "agentic", "dispatch": "frames", "temperature": 0.0}
    visual = {"max_pixels": 50_176, "time_marks": False}
    return {"overview_frames": 64, "episode": episode, "visual": visual} | changes


def test_differences_come_from_the_record():
    assert differences({"benchmark": "x", "asked": asked()}) == [
        "prompt mode agentic in our words",
        "frames of at most 50176 pixels, published without a limit",
    ]
    assert differences({}) == []
    endpoint = asked(endpoint={"note": "speaks text"}, upstream={"differs": ["other frames"]})
    assert {"speaks text", "other frames"} <= set(differences({"benchmark": "x", "asked": endpoint}))


def test_a_page_needs_a_benchmark_of_the_table():
    with pytest.raises(ValueError, match="nothing to put beside"):
        markdown({"mine": {"needles": {}}})
