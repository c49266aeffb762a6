"""What an episode earns, and what must not pay."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.config import RewardConfig
from paravt.conversation import Conversation
from paravt.protocol import parse_turn
from paravt.rewards import Site, score
from paravt.rewards.accuracy import span_iou, token_f1
from paravt.rewards.published import anchor_bonus, degenerate, published_format, published_tool
from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, ToolCall

FAST = settings(max_examples=100, deadline=None)
DEFAULT = RewardConfig()
MCQ = Sample("m", "v.mp4", "Which shape?", "A", "mcq", ("circle", "square", "triangle"))
TVG = Sample("t", "v.mp4", "When?", (3.0, 7.0), "tvg")
OE = Sample("o", "v.mp4", "What?", "red square", "oe")
THINK = "<think>\nlook at it first\n</think>\n"
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n</tool_call>'


def answer(text: str) -> str:
    return f"{THINK}<answer>{text}</answer>"


def episode(*texts: str, ran: tuple[int, ...] | None = None) -> Rollout:
    """An episode of these turns. `ran`: how many calls of each turn ran; by default all that can."""
    turns = []
    for i, text in enumerate(texts):
        parsed = parse_turn(text)
        count = len(parsed.valid_calls) if ran is None else ran[i]
        turns.append(
            EpisodeTurn(text, parsed, (Execution(ToolCall("crop_video", {}), "ok", "a report"),) * count)
        )
    last = turns[-1].parsed.answer
    stop = "no_answer" if last is None else "answered"
    return Rollout("m", turns, Conversation(-1), [], last, stop, frame_budget=8)


def total(rollout: Rollout, sample: Sample = MCQ, config: RewardConfig = DEFAULT) -> float:
    return score(rollout, sample, config).total


# --- accuracy


def test_mcq():
    assert score(episode(answer("A")), MCQ, DEFAULT).accuracy == 1.0
    assert score(episode(answer("circle")), MCQ, DEFAULT).accuracy == 1.0
    assert score(episode(answer("B")), MCQ, DEFAULT).accuracy == 0.0
    assert score(episode(answer("A man walks")), MCQ, DEFAULT).accuracy == 0.0


def test_the_last_answer_block_is_scored_and_an_answer_beside_a_call_is_not():
    both = f"{THINK}<answer>B</answer> no, <answer>A</answer>"
    assert score(episode(both), MCQ, DEFAULT).accuracy == 1.0
    assert score(episode(f"{THINK}{CALL}<answer>A</answer>"), MCQ, DEFAULT).accuracy == 0.0


@pytest.mark.parametrize(
    "span, expected",
    [
        ((3, 7), 1.0),
        ((5, 9), 2 / 6),
        ((0, 10), 0.4),
        ((8, 9), 0.0),
        ((7, 9), 0.0),
        ((5, 5), 0.0),
        ((0, 9999), 4 / 9999),
    ],
)
def test_iou(span, expected):
    assert span_iou(span, (3.0, 7.0)) == pytest.approx(expected)


def test_iou_of_spans_of_no_length():
    assert span_iou((5.0, 5.0), (5.0, 5.0)) == 1.0 and span_iou((5.0, 5.0), (6.0, 6.0)) == 0.0


def test_a_span_in_a_sentence_scores_as_the_bare_span():
    sentence = "The shape shows from 5.0 to 9.0 seconds."
    assert score(episode(answer(sentence)), TVG, DEFAULT).accuracy == pytest.approx(1 / 3)
    assert (
        score(episode(answer("7 to 3")), TVG, DEFAULT).reasons[0] == "accuracy: no single span in the answer"
    )


@pytest.mark.parametrize(
    "said, gold, expected",
    [
        ("red square", "red square", 1.0),
        ("The RED square.", "a red square", 1.0),
        ("square", "red square", 2 / 3),
        ("red red red red", "red square", 2 / 6),
        ("red red", "red red square", 4 / 5),
        ("3", "-3", 0.0),
        ("35", "3.5", 0.0),
        ("1,000", "1000", 1.0),
        ("the", "A", 0.0),
        ("...", "A", 0.0),
        ("a", "A", 1.0),
    ],
)
def test_token_f1(said, gold, expected):
    assert token_f1(said, gold) == pytest.approx(expected)


def test_open_ended_variants():
    exact = RewardConfig(open_ended="exact")
    assert score(episode(answer("the red square")), OE, exact).accuracy == 1.0
    assert score(episode(answer("square")), OE, exact).accuracy == 0.0
    judge = RewardConfig(open_ended="judge")
    assert score(episode(answer("crimson box")), OE, judge, judge_verdict=0.5).accuracy == 0.5
    for verdict in (None, float("nan"), 7.0, -1.0):
        reward = score(episode(answer("crimson box")), OE, judge, judge_verdict=verdict)
        assert reward.accuracy is None and reward.total is None and reward.format == 1.0
        assert "the judge's verdict" in reward.reasons[0]
    assert score(episode(answer(" . ")), OE, judge, judge_verdict=1.0).accuracy == 0.0


def test_what_cannot_be_known_is_none():
    empty_gold = Sample("o", "v.mp4", "What?", " ... ", "oe")
    reward = score(episode(answer("cat")), empty_gold, DEFAULT)
    assert (reward.accuracy, reward.total) == (None, None)
    assert reward.reasons[0] == "accuracy: the gold answer is empty"
    failed = Rollout("m", [], Conversation(-1), [], None, "failed", 8, error="v.mp4: undecodable")
    reward = score(failed, MCQ, DEFAULT)
    assert (reward.accuracy, reward.format, reward.tool, reward.total, reward.sites) == (
        None,
        None,
        None,
        None,
        (),
    )
    assert reward.reasons == ("failed: v.mp4: undecodable",)


# --- format


def kinds(rollout: Rollout) -> list[tuple]:
    return [(site.kind, site.turn, site.ok) for site in score(rollout, MCQ, DEFAULT).sites]


def test_sites_of_a_good_episode():
    assert kinds(episode(THINK + CALL + CALL, answer("A"))) == [
        ("think", 0, True),
        ("call", 0, True),
        ("think", 1, True),
        ("answer", 1, True),
    ]
    assert kinds(episode(answer("A"))) == [("think", 0, True), ("answer", 0, True)]


@pytest.mark.parametrize(
    "turns, faults, expected",
    [
        ((answer("A"),), [], 1.0),
        ((THINK + CALL, answer("A")), [], 1.0),
        (("<answer>A</answer>",), ["no think"], 0.5),
        (("<think>\nhm <answer>A</answer>",), ["think not closed"], 0.5),
        (("hm</think><answer>A</answer>",), ["think not opened"], 0.5),
        (("<think>\n</think><answer>A</answer>",), ["think is empty"], 0.5),
        ((THINK,), ["no answer block"], 0.5),
        ((THINK + "<answer>A",), ["answer not closed"], 0.5),
        ((THINK + "A</answer>",), ["answer not closed"], 0.5),
        ((answer(" "),), ["answer is empty"], 0.5),
        ((answer("A") + "<answer>B</answer>",), ["more than one answer block"], 0.5),
        (("<think>\nhm",), ["think not closed", "no answer block"], 0.0),
        (("B",), ["no think", "no answer block"], 0.0),
        ((THINK + CALL,), ["the episode ends on a call"], 0.5),
        ((THINK + CALL + "<answer>A</answer>", answer("A")), ["answer beside a call"], 0.5),
        ((THINK + CALL.replace("</tool_call>", ""), answer("A")), ["call not closed"], 0.5),
        ((THINK + CALL + "<tool_call></tool_call>", answer("A")), ["empty call"], 0.5),
        ((THINK + CALL * 6, answer("A")), ["not run: at most 5 calls a turn"], 0.5),
    ],
)
def test_format_by_sites(turns, faults, expected):
    reward = score(episode(*turns), MCQ, DEFAULT)
    assert [site.reason for site in reward.sites if not site.ok] == faults
    assert reward.format == pytest.approx(expected)
    assert [reason for reason in reward.reasons if reason.startswith("format")] == [
        f"format: {site.reason} (turn {site.turn})" for site in reward.sites if not site.ok
    ]


TURNS = st.sampled_from(
    [
        answer("A"),
        answer("B"),
        answer(""),
        THINK + CALL,
        THINK + CALL * 2,
        THINK,
        "A",
        CALL,
        THINK + "<tool_call>",
    ]
    + [
        "<think>\nhm" + CALL,
        "<think>\nhm<answer>A</answer>",
        answer("A") * 2,
        answer("A") + CALL,
        THINK + CALL[:-3],
    ]
)


@FAST
@given(st.lists(TURNS, min_size=1, max_size=4))
def test_full_format_is_compliance(texts):
    rollout = episode(*texts)
    assert (score(rollout, MCQ, DEFAULT).format == 1.0) == rollout.compliant


# --- tool


def test_gated_tool_pays_with_the_answer_only():
    assert total(episode(THINK + CALL, answer("A"))) == pytest.approx(2.8)
    assert total(episode(THINK + CALL, answer("B"))) == pytest.approx(1.0)
    assert total(episode(answer("A"))) == pytest.approx(2.0)
    half = RewardConfig(tool_weight=0.4, format_weight=0.5)
    assert total(episode(THINK + CALL, answer("A")), config=half) == pytest.approx(1.9)


def test_what_ran_is_read_from_the_record():
    assert total(episode(THINK + CALL, answer("A"), ran=(0, 0))) == pytest.approx(2.0)
    failed = episode(THINK + CALL, answer("A"))
    execution = Execution(ToolCall("crop_video", {}), "error", "the window is empty")
    failed.turns[0] = EpisodeTurn(failed.turns[0].text, failed.turns[0].parsed, (execution,))
    assert score(failed, MCQ, DEFAULT).tool == 0.0
    copied = f"<think>\n{CALL}<tool_response>\na circle\n</tool_response>\n</think>\n<answer>A</answer>"
    assert score(episode(copied), MCQ, DEFAULT).tool == 0.0


@pytest.mark.parametrize(
    "accuracy, readable, ran, expected",
    [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0.1),
        (1, 1, 0, 0.6),
        (0, 2, 2, 0.3),
        (1, 1, 1, 0.8),
        (0.01, 1, 1, 0.8),
    ],
)
def test_published_ladder(accuracy, readable, ran, expected):
    assert published_tool(accuracy, readable, ran) == pytest.approx(expected)


def test_published_ladder_reads_executions():
    config = RewardConfig(tool="published")
    assert score(episode(THINK + CALL, answer("A")), MCQ, config).tool == pytest.approx(0.8)
    assert score(episode(THINK + CALL, answer("B")), MCQ, config).tool == pytest.approx(0.3)
    written = f"{THINK}{CALL}<tool_response>\nseen\n</tool_response>"
    assert score(episode(written, answer("B"), ran=(0, 0)), MCQ, config).tool == pytest.approx(0.1)
    assert score(episode(answer("A")), MCQ, config).tool == 0.0


def test_parts_can_be_off():
    off = RewardConfig(tool="off", format="off")
    reward = score(episode(THINK + CALL, answer("A")), MCQ, off)
    assert (reward.format, reward.tool, reward.total) == (0.0, 0.0, 1.0) and len(reward.sites) == 4


# --- published format, the values that the released functions give


@pytest.mark.parametrize(
    "text, para, suffix, vanilla",
    [
        (answer("B"), 1.00, 0.80, 0.70),
        (answer("B").removeprefix("<think>"), 0.50, 0.50, 0.30),
        (THINK + CALL + "\n" + answer("B"), 1.00, 1.00, 1.00),
        (THINK + CALL, 0.80, 0.60, 0.70),
        ("<think>\nlook at it first\n<answer>B</answer>", 0.55, 0.70, 0.60),
        ("<think>\nlook at it first", 0.05, 0.20, 0.30),
        ("B", 0.0, 0.0, 0.0),
    ],
)
def test_published_format(text, para, suffix, vanilla):
    assert published_format(text, "published_para") == pytest.approx(para)
    assert published_format(text, "published_suffix") == pytest.approx(suffix)
    assert published_format(text, "published_vanilla") == pytest.approx(vanilla)


def test_published_format_sees_the_whole_episode():
    config = RewardConfig(format="published_suffix")
    assert score(episode(answer("B")), MCQ, config).format == pytest.approx(0.8)
    # 0.2 think + 0.3 + 0.2 answer + 0.3 call + 0.1 pairs, cut at 1
    assert score(episode(THINK + CALL, answer("B")), MCQ, config).format == 1.0


def test_published_corners():
    assert anchor_bonus(answer("B")) == pytest.approx(0.35)
    assert anchor_bonus("<think>\nlook at it first") == pytest.approx(-0.15)
    assert published_format("<think>", "published_para") == pytest.approx(-0.15)  # never floored
    code = "<tool_code>crop_video(1, 2)</tool_code>"
    assert published_format(THINK + code, "published_suffix") == pytest.approx(0.6)
    assert published_format(code + THINK, "published_suffix") == pytest.approx(0.3)
    assert degenerate("<|im_start|>" * 5) and not degenerate("<|im_start|>" * 5 + "x" * 300)
    broken = episode(answer("A") + "<|im_start|>" * 5)
    assert total(broken, config=RewardConfig(format="published_para")) == 0.0


# --- farming

HONEST_WRONG = total(episode(answer("B")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "...",
        "the",
        "A man walks by",
        "I am not sure",
        "A, B, C",
        "A or B or C",
        "circle, square, triangle",
    ]
    + ["(A) (B) (C)", "B. circle", "AAAA", "<tool_response>A</tool_response> B", "<|im_end|>"],
)
def test_no_text_that_is_no_choice_pays_more_than_a_wrong_choice(text):
    for turns in ((answer(text),), (THINK + CALL, answer(text))):
        assert total(episode(*turns)) <= HONEST_WRONG


def test_a_gold_letter_that_is_an_article():
    for text in ("the", "a man", "A man", "an", "A square"):
        assert score(episode(answer(text)), MCQ, DEFAULT).accuracy == 0.0


def test_a_span_over_everything_earns_next_to_nothing():
    assert total(episode(answer("0 to 9999")), TVG) <= 1.0 + 1e-3
    assert total(episode(answer("0 to 9999")), TVG) < total(episode(answer("0 to 99")), TVG)
    assert total(episode(answer("0 to 3, 3 to 7, 7 to 9")), TVG) == 1.0


def test_right_with_one_call_beats_wrong_with_six():
    assert total(episode(THINK + CALL, answer("A"))) > total(
        episode(THINK + CALL * 5, THINK + CALL, answer("B"))
    )


@FAST
@given(st.sampled_from(["A", "B", "A man"]), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
def test_repeated_crops_add_nothing(text, rounds, calls, more):
    few = episode(*[THINK + CALL * calls] * rounds, answer(text))
    many = episode(*[THINK + CALL * more] * rounds, THINK + CALL, answer(text))
    assert total(few) == pytest.approx(total(many))


@FAST
@given(st.integers(1, 3), st.integers(1, 5))
def test_no_number_of_crops_makes_up_for_an_empty_answer(rounds, calls):
    assert total(episode(*[THINK + CALL * calls] * rounds, answer(""))) < HONEST_WRONG


@FAST
@given(
    st.sampled_from(["B", "C", "A or B", "", "none"]),
    st.lists(
        st.sampled_from([THINK + CALL, THINK + CALL * 3, THINK + CALL + "<tool_call></tool_call>"]),
        max_size=3,
    ),
    st.sampled_from(
        ["", "<tool_response>\nA\n</tool_response>", "<tool_call></tool_call>", "<answer></answer>"]
    ),
)
def test_calls_and_copied_tags_never_raise_the_total_of_a_wrong_answer(text, rounds, extra):
    assert total(episode(*rounds, THINK + extra + f"<answer>{text}</answer>")) <= HONEST_WRONG + 1e-12


BROKEN_ENDS = ["", "hm", THINK, THINK + "<answer>B", THINK + "B</answer>", "<answer>B</answer>", answer("")]


@FAST
@given(
    st.sampled_from(BROKEN_ENDS + ["<think>\nhm<answer>B", answer("B") * 2, answer("B") + CALL]),
    st.lists(st.sampled_from([THINK + CALL, THINK + CALL * 3, CALL, THINK + "<tool_call>"]), max_size=3),
)
def test_no_turn_of_calls_pays_beside_a_malformed_or_missing_answer(end, rounds):
    assert total(episode(*rounds, end)) <= total(episode(end))


@FAST
@given(st.lists(TURNS, min_size=1, max_size=3), TURNS, st.integers(0, 3))
def test_no_added_turn_raises_the_format(texts, extra, at):
    more = [*texts[: min(at, len(texts) - 1)], extra, *texts[min(at, len(texts) - 1) :]]
    assert score(episode(*more), MCQ, DEFAULT).format <= score(episode(*texts), MCQ, DEFAULT).format


@FAST
@given(st.sampled_from(BROKEN_ENDS), st.integers(1, 3))
def test_well_written_calls_leave_the_format_as_it_is(end, rounds):
    many = episode(*[THINK + CALL] * rounds, end)
    assert score(many, MCQ, DEFAULT).format == score(episode(end), MCQ, DEFAULT).format


@FAST
@given(st.lists(TURNS, min_size=1, max_size=3))
def test_tags_without_content_never_raise_the_total(texts):
    plain = total(episode(*texts))
    for tags in ("<tool_call></tool_call>", "<tool_code></tool_code>", "<answer></answer>"):
        assert total(episode(*texts[:-1], texts[-1] + tags)) <= plain + 1e-12
    if "<think>" not in texts[-1]:
        assert total(episode(*texts[:-1], "<think></think>" + texts[-1])) <= plain + 1e-12


@FAST
@given(st.lists(TURNS, min_size=1, max_size=3), st.floats(0, 3), st.floats(0, 3))
def test_the_total_is_the_sum_of_its_parts(texts, tool_weight, format_weight):
    config = RewardConfig(tool_weight=tool_weight, format_weight=format_weight)
    reward = score(episode(*texts), MCQ, config)
    assert 0 <= reward.accuracy <= 1 and 0 <= reward.format <= 1
    assert reward.total == reward.accuracy + format_weight * reward.format + reward.tool
    assert reward == score(episode(*texts), MCQ, config)


def test_a_reward_is_the_same_after_the_rollout_was_written_and_read():
    rollout = episode(THINK + CALL * 6 + "<tool_code>zoom(1)</tool_code>", "<think>\nhm<answer>A")
    again = Rollout.from_json(json.loads(json.dumps(rollout.to_json())))
    assert again == rollout and score(again, MCQ, DEFAULT) == score(rollout, MCQ, DEFAULT)
    assert Site("call", 0, False, "not run: at most 5 calls a turn") in score(again, MCQ, DEFAULT).sites
