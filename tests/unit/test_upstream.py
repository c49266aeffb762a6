"""Published baselines: prompts cut out of files of the described shapes, and replies in each dialect."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.agent import AgentSetup, run_episodes
from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig
from paravt.data.baselines import fetch_prompts
from paravt.protocol import parse_turn, read_choice, read_span
from paravt.protocol.dialects import DIALECTS
from paravt.protocol.families import FAMILIES, family_of, load
from paravt.protocol.upstream import Piece, UpstreamError, python_value, read_piece, shell_value, tool_text
from paravt.rollout import Sample, ToolCall, ToolError
from tests.clips import write_clip
from tests.fakes import ScriptedEngine
from tests.raw_host import FILES, RawHost
from tests.tiny import VISUAL, tiny_encoder

MCQ = Sample("m", "/data/v 1.mp4", "Which shape?", "B", "mcq", ("A. circle", "B. square"))
TVG = Sample("t", "/data/v 1.mp4", "When does it open?", (1.0, 2.0), "tvg", (), {"caption": "a door opens"})
OPEN = Sample("o", "/data/v 1.mp4", "Which law?", "Ohm", "oe")


@pytest.fixture
def folder(tmp_path) -> Path:
    for family in FAMILIES.values():
        for file in family.files:
            path = tmp_path / family.name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(FILES[file], encoding="utf-8")
    return tmp_path


def test_each_family_names_a_commit_and_says_what_it_cannot_do():
    assert {
        "paravt",
        "longvt",
        "videozoomer",
        "sage",
        "video-r1",
        "videorft",
        "videochat-r1",
        "time-r1",
    } <= set(FAMILIES)
    for family in FAMILIES.values():
        assert len(family.commit) == 40 and family.dialect in DIALECTS and family.files
        assert family.has_tool == (family.max_turns > 0)
    with pytest.raises(UpstreamError, match="use one of paravt"):
        family_of("upstream:nobody")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_prompt_is_read_and_filled(name, folder):
    upstream = load(f"upstream:{name}", folder)
    for sample in (MCQ, TVG, OPEN):
        if sample.question_type not in upstream.family.kinds:
            with pytest.raises(UpstreamError, match="no prompt for oe"):
                upstream.prompt(sample)
            continue
        system, text = upstream.prompt(sample)
        whole = (system or "") + text
        words = {"mcq": ("Which shape?", "circle", "square"), "tvg": ("open",), "oe": ("Which law?",)}
        assert all(word in whole for word in words[sample.question_type])
        assert not any(slot in whole for slot in ("{question}", "{options}", "{Question}", "[EVENT]", "<<<"))
        assert "/data/" not in whole and whole.count("A. A. ") == 0
    assert len(upstream.fingerprint) == 16
    assert load(name, folder).fingerprint == upstream.fingerprint


def test_texts_are_the_repositories_own(folder):
    system, text = load("paravt", folder).prompt(MCQ)
    assert system == 'Tools: {"name": "crop_video", "parameters": {"a": 1}}\n{"name": "crop_video"} go'
    assert text.endswith("The video path for this video is: v 1.mp4")
    assert load("videozoomer", folder).texts["system"] == (
        'Zoom by <video_zoom> {"segment": [a, b], "fps": n} </video_zoom>. Put it in \\\\boxed{{}}.'
    )
    _, text = load("video-r1", folder).prompt(MCQ)
    assert text == "Which shape?Options:\nA. circle\nB. square\n\nThink hard. One letter."
    _, text = load("videorft", folder).prompt(MCQ)
    assert text == "Which shape?\nA. circle\nB. square\n\nThink hard. One letter."
    _, text = load("time-r1", folder).prompt(MCQ)
    assert text == "Best option.\nQuestion: Which shape?\n(A) circle\n(B) square"
    assert load("time-r1", folder).prompt(TVG)[1] == 'Find "a door opens" now.'
    assert load("videochat-r1", folder).prompt(TVG)[1] == 'Find "a door opens".'
    assert "Option: A. circle, B. square" in load("conan", folder).prompt(MCQ)[1]
    assert "Think, then call." in load("longvt", folder).prompt(MCQ)[1]
    system, _ = load("sage", folder).prompt(OPEN)
    assert "extract_parts_from_timestamp(video_path: str, timestamp_start: str, timestamp_end: str)" in system


def test_what_is_not_there_is_one_sentence(folder):
    (folder / "sage" / "sage/prompts/sage/context_vlm.txt").unlink()
    with pytest.raises(UpstreamError, match="paravt eval fetch --prompts sage"):
        load("sage", folder)
    driver = FILES["paravt/eval/driver.py"]
    with pytest.raises(UpstreamError, match="a placeholder there"):
        read_piece(driver, Piece("f", "python", "OTHER"))
    with pytest.raises(UpstreamError, match="no text is assigned to NONE"):
        read_piece(driver, Piece("f", "python", "NONE"))
    with pytest.raises(UpstreamError, match="not a Python file"):
        python_value("def (", "X")
    with pytest.raises(UpstreamError, match="no text is assigned"):
        python_value("X = open('/etc/passwd').read()", "X")
    with pytest.raises(UpstreamError, match="no argument"):
        shell_value("data.other='x'", "data.system_prompt")
    with pytest.raises(UpstreamError, match="no function"):
        tool_text("def f():\n    pass\n", "f")
    with pytest.raises(UpstreamError, match="no entry 'z'"):
        read_piece("X = {'a': 'b'}", Piece("f", "python", "X", "z"))


@pytest.fixture
def raw(tmp_path, monkeypatch):
    with RawHost(tmp_path / "raw") as host:
        monkeypatch.setenv("PARAVT_RAW_URL", host.url)
        yield host


def test_files_are_fetched_once_at_their_commit(raw, tmp_path):
    out = tmp_path / "prompts"
    paths = fetch_prompts(["sage", "longvt"], out)
    assert len(paths) == 4 and load("sage", out).texts["tool"]
    assert all(family_of(name).commit in path for name, path in zip(["sage"], raw.asked[:1], strict=True))
    record = json.loads((out / "sage" / "source.json").read_text())
    assert record["commit"] == family_of("sage").commit and len(record["sha256"]) == 2
    asked = len(raw.asked)
    fetch_prompts(["sage", "longvt"], out)
    assert len(raw.asked) == asked
    paths[0].write_text("changed", encoding="utf-8")
    fetch_prompts(["sage"], out)
    assert len(raw.asked) == asked + 1 and paths[0].read_text(encoding="utf-8") != "changed"
    (raw.root / "allenai/SAGE" / family_of("sage").commit / "sage/prompts/sage/context_vlm.txt").unlink()
    with pytest.raises(UpstreamError, match="answers 404"):
        fetch_prompts(["sage"], tmp_path / "again", wait_s=0.0)


def test_without_a_network_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAVT_RAW_URL", "http://127.0.0.1:9")
    with pytest.raises(UpstreamError, match="cannot be fetched"):
        fetch_prompts(["sage"], tmp_path, wait_s=0.0)


# --- replies


def window(call) -> tuple:
    return call.arguments["start_time"], call.arguments["end_time"]


def test_zoom():
    turn = parse_turn(
        '<think>I zoom.</think><video_zoom>{"segment": [4.0, 6.0], "fps": 2}</video_zoom>', 1, "zoom"
    )
    [call] = turn.valid_calls
    assert window(call) == (4.0, 6.0) and call.arguments["fps"] == 2.0 and turn.answer is None
    assert turn.think == "I zoom." and turn.well_formed
    for body, words in (
        ('{"segment": [0, 20], "fps": 2}', "40 frames; at most 16"),
        ('{"segment": [1]}', "segment must be"),
        ('{"segment": [1, 2], "fps": 0}', "fps must be"),
        ("zoom please", "not valid JSON"),
    ):
        [call] = parse_turn(f"<think>a</think><video_zoom>{body}</video_zoom>", 1, "zoom").calls
        assert isinstance(call, ToolError) and words in call.message
    for text in (
        "<think>a</think><answer>\\boxed{B}</answer>",
        "<think>a</think>\\boxed{{B}}.",
        "<think>a</think>B.",
    ):
        answer = parse_turn(text, 1, "zoom").answer
        assert read_choice(answer, ("circle", "square")) == "B", text
    assert parse_turn("<think>a</think><answer>\\\\boxed{square}</answer>", 1, "zoom").answer == "square"
    assert parse_turn('<video_zoom>{"segment": [1, 2]}</video_zoom>').calls == (), (
        "our own turns have no zoom"
    )


def test_clip():
    clips = "00:00:05-00:00:10, 01:02:03-01:02:09"
    text = f"<score>5</score><think>more</think><clip>{clips}</clip><answer></answer>"
    turn = parse_turn(text, 5, "clip")
    assert [window(call) for call in turn.valid_calls] == [("00:00:05", "00:00:10"), ("01:02:03", "01:02:09")]
    assert turn.answer is None
    turn = parse_turn("<score>5</score><think>enough</think><clip></clip><answer>C</answer>", 5, "clip")
    assert turn.calls == () and turn.answer == "C"
    [call] = parse_turn("<think>a</think><clip>all of it</clip>", 5, "clip").calls
    assert "HH:MM:SS-HH:MM:SS" in call.message


def sage(**fields) -> str:
    return f"<json>{json.dumps({'video_context': 'A man walks.', 'final_answer': None} | fields)}</json>"


def test_sage():
    calls = [
        {"rationale": "r", "name": "extract_parts_from_timestamp",
         "arguments": {"video_path": "v", "timestamp_start": "00:01:00", "timestamp_end": "00:01:30"}},
        {"name": "second", "arguments": {}},
    ]  # fmt: skip
    text = sage(recommended_tools={"needed": True, "tool_calls": calls})
    for spelled in (text, text.replace("<json>", "```json\n").replace("</json>", "\n```"), text[6:-7]):
        turn = parse_turn(spelled, 1, "sage")
        assert [window(call) for call in turn.valid_calls] == [("00:01:00", "00:01:30")], (
            "only the first is run"
        )
        assert turn.think == "A man walks." and turn.answer is None
    answered = sage(final_answer="B", recommended_tools={"needed": True, "tool_calls": calls})
    assert parse_turn(answered, 1, "sage").answer == "B" and not parse_turn(answered, 1, "sage").calls
    later = sage(answerable={"verdict": False, "reasoning": "too dark"}, recommended_tools={
        "needed": True, "tool_calls": [{"name": "web_search", "arguments": {"query": "x"}}]})  # fmt: skip
    [call] = parse_turn(later, 1, "sage").calls
    assert isinstance(call, ToolError) and "web_search is not available here" in call.message
    for text in (
        "",
        "no json",
        "<json>{",
        "[1]",
        sage(),
        sage(final_answer="null"),
        sage(recommended_tools=3),
    ):
        turn = parse_turn(text, 1, "sage")
        assert turn.answer is None and not turn.calls


@pytest.mark.parametrize(
    "dialect, text, answer",
    [
        ("plain", "<think>a <timestep>1 to 2</timestep></think><answer>(B)</answer>", "(B)"),
        ("plain", "a</think>\n<answer>B</answer> and more", "B"),
        ("plain", "<think>a</think>\nThe answer is B.", "The answer is B."),
        ("plain", "The answer is B.", "The answer is B."),
        ("plain", "<think>never closed", None),
        ("plain", "<answer>A</answer> no: <answer>B</answer>", "B"),
        ("plain_first", "<answer>A</answer> no: <answer>B</answer>", "A"),
        ("plain_first", "<answer></answer><answer>B</answer>", "B"),
        ("paravt_first", "<think>a</think><answer>A</answer><answer>B</answer>", "A"),
        ("paravt", "<think>a</think>The answer is B.", None),
        ("plain", "<think>a</think><answer>12.5 to 17.8</answer><glue>[(1, 2)]</glue>", "12.5 to 17.8"),
        ("clip", "<think>a</think>B", "B"),
    ],
)
def test_answers_as_each_family_means_them(dialect, text, answer):
    assert parse_turn(text, 5, dialect).answer == answer


PARTS = ("<think>", "</think>", "<answer>", "</answer>", "<video_zoom>", "</video_zoom>", "<clip>", "</clip>")
PARTS += ("<json>", "</json>", '{"segment": [1, 2], "fps": ', "}", "00:01-00:02", "B", "\\boxed{", "null")
PARTS += ('{"final_answer": ', '"x"', "```json", "<tool_call>", "</tool_call>")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(DIALECTS)),
    st.lists(
        st.sampled_from(PARTS) | st.text(max_size=6),
        max_size=12,
    ),
)
def test_any_text_is_read_in_any_dialect(dialect, parts):
    turn = parse_turn("".join(parts), 3, dialect)
    assert len(turn.calls) == 0 or turn.answer is None
    for call in turn.calls:
        assert isinstance(call, ToolCall | ToolError)
    assert turn.answer is None or isinstance(turn.answer, str)
    assert read_span(turn.answer) is None or turn.answer


# --- whole episodes


def episode(upstream, clip, reply, sample=MCQ):
    encoder = ChatEncoder(tiny_encoder().tokenizer, VISUAL, upstream.family.mark)
    engine = ScriptedEngine(encoder, reply)
    family = upstream.family
    config = EpisodeConfig(
        mode=f"upstream:{family.name}", dispatch="frames", force_think=False, temperature=0.0,
        max_turns=family.max_turns, max_calls=family.max_calls,
    )  # fmt: skip
    asked = Sample(sample.id, str(clip), sample.question, sample.answer, sample.question_type, sample.options)
    setup = AgentSetup(encoder, config, VISUAL, lambda sample: 4, 1, upstream=upstream)
    [rollout] = run_episodes(engine, [asked], setup)
    return rollout, encoder.tokenizer.decode(rollout.main.ids)


def test_a_zoomer_gets_its_frames_at_its_rate(folder, tmp_path):
    clip = write_clip(tmp_path / "a.mp4", 300)
    replies = (
        '<think>I zoom.</think><video_zoom>{"segment": [2.0, 4.0], "fps": 4}</video_zoom>',
        "<think>I see.</think><answer>\\boxed{B}</answer>",
    )
    rollout, text = episode(load("videozoomer", folder), clip, lambda prompt: replies[prompt.turn])
    assert rollout.answer == "B" and rollout.call_count == 1
    times = rollout.executions[0].times_s
    assert len(times) == 9 and times[0] == 2.0 and times[1] == pytest.approx(2.25, abs=0.04)
    assert "<frame0_time2.00s>" in text and "<tool_response>" not in text


def test_conan_and_sage_use_the_clock(folder, tmp_path):
    clip = write_clip(tmp_path / "a.mp4", 300)
    replies = (
        "<think>a</think><clip>00:00:02-00:00:04</clip>",
        "<think>b</think><clip></clip><answer>B</answer>",
    )
    rollout, text = episode(load("conan", folder), clip, lambda prompt: replies[prompt.turn])
    assert rollout.answer == "B" and rollout.executions[0].window_s == (2.0, 4.0)
    assert "00:00:02<|vision_start|>" in text
    call = {
        "name": "extract_parts_from_timestamp",
        "arguments": {"timestamp_start": "00:02", "timestamp_end": "4"},
    }
    replies = (sage(recommended_tools={"needed": True, "tool_calls": [call]}), sage(final_answer="square"))
    rollout, text = episode(load("sage", folder), clip, lambda prompt: replies[prompt.turn])
    assert rollout.answer == "square" and rollout.executions[0].window_s == (2.0, 4.0)


def test_a_tool_of_the_chat_template(folder, tmp_path):
    """LongVT offers its tool by the model's own template; a tokenizer without one is refused."""
    clip = write_clip(tmp_path / "a.mp4", 60)
    upstream = load("longvt", folder)
    with pytest.raises(ValueError, match="takes no tools"):
        episode(upstream, clip, lambda prompt: "<answer>B</answer>")
    tokenizer = tiny_encoder().tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "<|im_start|>system\n<tools>{{ tools[0] | tojson }}</tools><|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    try:
        rollout, text = episode(upstream, clip, lambda prompt: "<think>a</think><answer>B</answer>")
    finally:
        tokenizer.chat_template = before
    assert rollout.answer == "B" and '<tools>{"' in text.partition("<|im_end|>")[0]


def test_a_baseline_without_a_tool_has_none(folder, tmp_path):
    clip = write_clip(tmp_path / "a.mp4", 60)
    arguments = '{"start_time": 0, "end_time": 1}'
    call = f'<think>a</think><tool_call>{{"name": "crop_video", "arguments": {arguments}}}</tool_call>'
    rollout, _ = episode(load("video-r1", folder), clip, lambda prompt: call)
    assert rollout.call_count == 0 and rollout.answer is None and len(rollout.turns) == 1
