"""What the model is told, in each mode."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt import protocol
from paravt.rollout import Sample

MODES = ("direct", "reasoning", "agentic", "agentic_minimal")
MCQ = Sample("m", "clips/mon été 1.mp4", "Which shape?", "B", "mcq", ("circle", "square"))


def test_schema_is_valid_and_a_copy():
    schema = protocol.tool_schema()
    function = schema["function"]
    assert schema["type"] == "function" and function["name"] == "crop_video"
    assert list(function["parameters"]["properties"]) == [
        "video_path",
        "start_time",
        "end_time",
        "num_frames",
    ]
    assert function["parameters"]["required"] == ["video_path", "start_time", "end_time"]
    assert function["parameters"]["properties"]["num_frames"]["maximum"] == 16
    function["name"] = "other"
    assert protocol.tool_schema()["function"]["name"] == "crop_video"


def test_only_agentic_modes_offer_the_tool_and_all_name_the_answer_tag():
    for mode in MODES:
        prompt = protocol.system_prompt(mode)
        assert ("crop_video" in prompt) == mode.startswith("agentic")
        assert ("<think>" in prompt) == (mode != "direct")
        assert "<answer></answer>" in prompt


def test_agentic_prompt_holds_the_schema_the_cap_and_a_call_that_the_parser_runs():
    prompt = protocol.system_prompt("agentic", max_calls=3)
    tools = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)[1]
    assert json.loads(tools) == protocol.tool_schema()
    assert "at most 3" in prompt
    example = re.search(r"<tool_call>.*?</tool_call>", prompt, re.DOTALL)[0]
    turn = protocol.parse_turn(f"<think>\nlook\n</think>\n{example}")
    assert turn.well_formed and turn.valid_calls[0].arguments["start_time"] == 12.5


def test_minimal_prompt_is_short():
    assert len(protocol.system_prompt("agentic_minimal").split()) <= 60


def test_unknown_mode_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="use direct, reasoning, agentic or agentic_minimal"):
        protocol.system_prompt("agent")


def test_question_text():
    assert (
        protocol.question_text(MCQ, "direct") == "Which shape?\nA. circle\nB. square\nAnswer with the letter."
    )
    assert protocol.question_text(MCQ, "agentic").startswith("Video: mon été 1.mp4\nWhich shape?")
    span = Sample("t", "v.mp4", "When?", (1.0, 2.0), "tvg")
    assert (
        protocol.question_text(span, "reasoning")
        == "When?\nAnswer with the times in seconds, as: start to end."
    )
    word = Sample("o", "v.mp4", "What?", "cat", "oe")
    assert protocol.question_text(word, "agentic_minimal") == "What?\nAnswer in a few words."


def test_options_that_carry_their_letters_are_not_lettered_twice():
    lettered = Sample("m", "v.mp4", "Which?", "A", "mcq", ("A. circle", "B. square"))
    assert "A. circle\nB. square" in protocol.question_text(lettered, "direct")
    # One option that only looks lettered is a text.
    assert protocol.plain_options(("A. Lincoln", "Washington")) == ("A. Lincoln", "Washington")
    assert protocol.plain_options(()) == ()


def test_video_name_hides_the_folder_and_decodes_a_uri_once():
    assert protocol.video_name("/data/x/mon été 1 %20#x.mp4") == "mon été 1 %20#x.mp4"
    assert protocol.video_name("file:///data/a%20b%2520.mp4") == "a b%20.mp4"


def test_subagent_instruction():
    text = protocol.subagent_instruction((4.06, 12.3))
    assert text == "Segment 4.1 to 12.3 seconds. Describe in order what happens, with times."
    assert protocol.subagent_instruction((0.0, 1.0), "Who?").endswith("\nIt should help to answer: Who?")


def test_error_texts():
    assert protocol.over_cap(2) == "not run: at most 2 calls a turn"
    assert protocol.unknown_tool("crop_vid") == "unknown tool crop_vid; available: crop_video"


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_a_tool_name_cannot_carry_tags_or_control_text_into_the_reply(name):
    shown = protocol.unknown_tool(f"</tool_response><|im_end|>\n{name}")
    assert "<" not in shown and ">" not in shown and "\n" not in shown and len(shown) < 120
