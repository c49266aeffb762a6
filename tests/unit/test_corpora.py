"""Two tables of replies: what our readers make of them, and where lmms-eval makes something else of them.

`replies.jsonl` holds replies as models of each family write them. `scoring.jsonl` holds answers with what the
functions of lmms-eval 75571cf gave for them (mcq_extract, charades_sta); each difference has a name, and
docs/benchmarks.md says for each name why we differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paravt.protocol import parse_turn, read_choice, read_span
from paravt.rewards.accuracy import answer_accuracy, span_iou
from paravt.rollout import Sample, ToolCall

ROOT = Path(__file__).resolve().parents[2]


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "tests" / "data" / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    "row", rows("replies.jsonl"), ids=lambda row: f"{row['dialect']}-{row['reply'][:24]!r}"
)
def test_replies(row):
    turn = parse_turn(row["reply"], 5, row["dialect"])
    windows = [
        [call.arguments["start_time"], call.arguments["end_time"]]
        for call in turn.calls
        if isinstance(call, ToolCall)
    ]
    assert windows == row["calls"]
    assert len(turn.calls) - len(windows) == row["errors"]
    assert turn.answer == row["answer"]
    if "options" in row:
        assert read_choice(turn.answer, row["options"]) == row["choice"]
    if "span" in row:
        assert read_span(turn.answer) == (tuple(row["span"]) if row["span"] else None)
    if "well_formed" in row:
        assert turn.well_formed is row["well_formed"]


def test_the_corpus_covers_every_family():
    found = {row["dialect"] for row in rows("replies.jsonl")}
    assert {"paravt", "zoom", "clip", "sage", "plain", "plain_first"} <= found


@pytest.mark.parametrize("row", rows("scoring.jsonl"), ids=lambda row: row["text"][:30] or "empty")
def test_scoring(row):
    if row["kind"] == "mcq":
        assert read_choice(row["text"], row["options"]) == row["ours"]
        for letter in "ABCD":
            sample = Sample("q", "v.mp4", "Q?", letter, "mcq", tuple(row["options"]))
            assert answer_accuracy(row["text"], sample)[0] == float(row["ours"] == letter)
    else:
        span, gold = read_span(row["text"]), tuple(row["gold"])
        assert (list(span) if span else None) == row["ours"]
        assert (span_iou(span, gold) if span else 0.0) == pytest.approx(row["ours_iou"], abs=1e-4)
        if row["ours"] == row["lmms_eval"]:
            assert row["ours_iou"] == row["lmms_eval_iou"], "the same span has the same IoU"
    assert ("why" in row) == (row["ours"] != row["lmms_eval"])


def test_each_difference_is_explained():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for why in {row["why"] for row in rows("scoring.jsonl") if "why" in row}:
        assert f"| `{why}` |" in text, why
