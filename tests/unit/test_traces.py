"""Teacher traces: computable from what is seen, readable by our own parser, loosened on purpose only."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.config import NeedlesConfig, VisualConfig
from paravt.data.loose import Looseness, loosen
from paravt.data.needle_tables import write_tables
from paravt.data.needles import KINDS, Part, Scene, make_question, make_scene, overview_times_s, stable_rng
from paravt.data.traces import main_trace, report_text
from paravt.protocol import parse_turn, read_choice, read_open, read_span
from paravt.rollout import Sample

STRICT = Looseness().scaled(0)
CONFIG = NeedlesConfig(sft_count=6, rl_count=4, eval_count=4)
SCENE = Scene(
    "made",
    (
        Part("red", 0.0, 8.0, "circle", (2.0, 4.5), (0.5, 0.5)),
        Part("blue", 8.0, 16.0, "cross", (10.0, 12.0), (0.5, 0.5)),
        Part("cyan", 16.0, 24.0, "circle", (20.0, 23.0), (0.5, 0.5)),
    ),
)


def sample_of(kind: str, asked: list[str], options=(), answer="circle") -> Sample:
    types = {"when": "tvg", "name": "oe"}
    return Sample("s", "v.mp4", "?", answer, types.get(kind, "mcq"), options, {"kind": kind, "asked": asked})


def test_report_lists_each_frame_and_marks_where_a_shape_starts_and_ends():
    assert report_text(SCENE, [1.0, 2.0, 3.0, 5.0, 11.0]) == "\n".join(
        [
            "1.0 red",
            "2.0 red circle starts red 2.0",
            "3.0 red circle ends red 3.0",
            "5.0 red",
            "11.0 blue cross starts blue 11.0 ends blue 11.0",
        ]
    )


def test_dispatch_takes_its_window_from_the_frames_around_the_part():
    trace = main_trace(SCENE, sample_of("name", ["blue"]), [0.0, 7.9, 15.9, 23.9], use_tool=True)
    think, _, calls = trace.turns[0].partition("\n</think>\n")
    assert think == "find blue\n0.0 red\n7.9 red\n15.9 blue blue from 7.9\n23.9 cyan blue to 23.9"
    [call] = parse_turn("<think>\n" + trace.turns[0]).calls
    assert call.arguments == {"start_time": 7.9, "end_time": 23.9}


def test_gather_reads_the_reports_and_walks_the_options():
    sample = sample_of("shape", ["blue"], ("square", "cross", "circle", "triangle"), "B")
    trace = main_trace(SCENE, sample, [0.0, 7.9, 15.9, 23.9], True, [[10.0, 11.0, 12.0]])
    assert trace.turns[1] == ("blue cross\nA. square no\nB. cross yes\n</think>\n<answer>B</answer>")


def test_span_is_the_first_to_the_last_frame_that_shows_the_shape():
    sample = sample_of("when", ["red"], answer=(2.0, 4.5))
    trace = main_trace(SCENE, sample, [0.0, 7.9, 15.9, 23.9], True, [[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert read_span(parse_turn("<think>\n" + trace.turns[1]).answer) == (2.0, 4.0)


@settings(max_examples=60, deadline=None)
@given(
    index=st.integers(0, 10**4),
    kind=st.sampled_from(KINDS),
    budget=st.sampled_from([4, 8, 16]),
    use_tool=st.booleans(),
)
def test_every_trace_is_well_formed_covers_what_is_asked_and_answers(index, kind, budget, use_tool):
    scene = make_scene(CONFIG, 9, "sft", index)
    sample = make_question(scene, "v.mp4", kind, 0, stable_rng(index))
    overview_s = overview_times_s(scene.duration_s, CONFIG.fps, budget)
    looks = main_trace(scene, sample, overview_s, use_tool).looks
    crops_s = [[look.start_s + i for i in range(int(look.end_s - look.start_s) + 1)] for look in looks]
    trace = main_trace(scene, sample, overview_s, use_tool, crops_s)
    turns = [parse_turn("<think>\n" + text) for text in trace.turns]
    assert all(turn.well_formed for turn in turns)
    assert len(turns) == (2 if use_tool else 1)
    if use_tool:
        assert len(turns[0].calls) == len(sample.meta["asked"])
        for look in trace.looks:
            part = scene.part_of(look.colour)
            assert look.start_s <= part.start_s + 0.1 and look.end_s >= part.end_s - 0.11
    answer = turns[-1].answer
    if sample.question_type == "mcq":
        assert read_choice(answer, sample.options) == sample.answer
    elif sample.question_type == "oe":
        assert read_open(answer) == sample.answer
    else:
        assert read_span(answer) is not None


def test_strict_hand_changes_nothing_and_a_loose_one_keeps_the_calls():
    trace = main_trace(SCENE, sample_of("name", ["blue"]), [0.0, 7.9, 15.9, 23.9], use_tool=True)
    rng = stable_rng("hand")
    assert loosen(trace.turns[0], STRICT, rng) == trace.turns[0]
    python = loosen(trace.turns[0], STRICT.model_copy(update={"python_style": 1.0, "open_call": 1.0}), rng)
    assert python.endswith("<tool_code>\ncrop_video(start_time=7.9, end_time=23.9)")
    [call] = parse_turn("<think>\n" + python).calls
    assert call.arguments == {"start_time": 7.9, "end_time": 23.9} and call.style == "python"


def test_loose_turns_break_the_format_about_as_often_as_they_say():
    trace = main_trace(SCENE, sample_of("name", ["red"]), [0.0, 7.9, 15.9, 23.9], use_tool=False)
    rng = stable_rng("often")
    turns = [parse_turn("<think>\n" + loosen(trace.turns[0], Looseness(), rng)) for _ in range(600)]
    well = sum(turn.well_formed for turn in turns) / len(turns)
    assert well == pytest.approx(0.85 * 0.6, abs=0.06)  # think closed, answer neither bare nor open


def test_tables_hold_what_training_will_see(tmp_path):
    counts = write_tables(tmp_path, "data/needles", CONFIG, VisualConfig(), [4, 8], seed=2)
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert counts == {"sft": len(rows), "rl": 4, "eval": 4}
    main = [row for row in rows if row["kind"] == "main"]
    assert len(main) == 6 and len({row["id"] for row in rows}) == len(rows)
    for row in main:
        assert (tmp_path / "videos" / row["sample"]["video"].rpartition("/")[2]).is_file()
        reports = row["turns"][1]["results"] if len(row["turns"]) == 3 else []
        crops = [other for other in rows if other["id"].startswith(row["id"] + "-crop")]
        assert [crop["turns"][0]["text"] for crop in crops] == reports


def test_looseness_is_scaled_habit_by_habit():
    assert Looseness().scaled(1) == Looseness()
    assert set(STRICT.model_dump().values()) == {0.0}
    double = Looseness().scaled(2)
    assert (double.python_style, double.open_call, double.open_think) == (0.7, 0.3, 0.3)
    much = Looseness().scaled(10)
    assert (much.python_style, much.open_think) == (1.0, 1.0)
    assert (much.bare_answer, much.open_answer) == (0.5, 0.5)  # never more than one habit an answer
