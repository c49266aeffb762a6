"""What a step says of its episodes: which closer is missing, what is wrong, why calls did not run."""

from __future__ import annotations

import pytest

from paravt.agent import NO_TOOL, NO_TURN_LEFT
from paravt.config import RewardConfig
from paravt.conversation import Conversation
from paravt.grpo.batch import Group, step_rows, step_totals
from paravt.grpo.metrics import FAILURES, OTHER, failure_of, fault_of, step_metrics, unclosed
from paravt.parallel import Processes
from paravt.protocol import THINK_PREFIX, parse_turn
from paravt.rewards import score
from paravt.rewards.format import episode_sites
from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, ToolCall, ToolError
from paravt.times import TimeError, parse_window
from tests.tiny import tiny_encoder
from tests.unit.test_batch import CONFIG, OFF

SAMPLE = Sample("s", "v.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 3}}\n</tool_call>'


def episode(*texts: str, stop: str = "answered") -> Rollout:
    """An episode whose readable calls ran; the others got their error texts."""
    turns = []
    for text in texts:
        parsed = parse_turn(THINK_PREFIX + text)
        executions = tuple(
            Execution(call, call.kind, call.message)
            if isinstance(call, ToolError)
            else Execution(call, "ok", "a circle", (1.0, 3.0))
            for call in parsed.calls
        )
        turns.append(EpisodeTurn(THINK_PREFIX + text, parsed, executions))
    answer = turns[-1].parsed.answer if turns else None
    return Rollout("s", turns, Conversation(5, [1, 2], [0, 1], [0.0, -1.0]), [], answer, stop, 4, 4, (2,))


def metrics(*rollouts: Rollout, version: int = 2) -> dict[str, float]:
    group = Group(SAMPLE, 0, 4, list(rollouts), [score(r, SAMPLE, RewardConfig()) for r in rollouts])
    rows = step_rows(tiny_encoder(), [group], CONFIG, OFF)
    return step_metrics(step_totals(Processes(), [group], rows, 9), version)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("x\n</think>\n<answer>A</answer>", set()),
        ("x\n<answer>A</answer>", {"think"}),
        ("x\n</think>\n<answer>A", {"answer"}),
        (f"x\n</think>\n{CALL[:-12]}", {"call"}),
        (f"x\n{CALL[:-12]}\n<answer>A", {"think", "call", "answer"}),
    ],
)
def test_which_closer_is_missing(text, kinds):
    assert unclosed(episode(text)) == kinds


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("x\n</think>\n<answer>A</answer>", set()),
        ("x\n<answer>A</answer>", {"think_not_closed"}),
        ("</think>\n<answer></answer>", {"think_empty", "answer_empty"}),
        ("x\n</think>\nA", {"no_answer"}),
        ("x\n</think>\n<answer>A</answer><answer>B</answer>", {"several_answers"}),
        ("x\n</think>\n<answer>A", {"answer_not_closed"}),
        (f"x\n</think>\n{CALL}\n<answer>A</answer>", {"answer_beside_call"}),
        (f"x\n</think>\n{CALL}", {"ends_on_call"}),
        ("x\n</think>\n<tool_call>\nnonsense\n</tool_call>", {"call_unreadable", "ends_on_call"}),
    ],
)
def test_what_is_wrong_has_a_name(text, faults):
    assert {fault_of(site) for site in episode_sites(episode(text)) if not site.ok} == faults


def call(body: str, tag: str = "tool_call") -> str:
    return f"x\n</think>\n<{tag}>\n{body}\n</{tag}>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("nonsense"), "not_json"),
        (call('{"name": "crop_video"'), "not_json"),
        (call(""), "empty"),
        (call('{"name": "zoom", "arguments": {}}'), "unknown_tool"),
        (call('{"arguments": {"start_time": 1}}'), "no_name"),
        (call('{"name": "crop_video", "arguments": 3}'), "wrong_arguments"),
        (call('{"name": "crop_video", "arguments": {"start_time": 1}}'), "missing_argument"),
        (call('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": []}}'), "not_a_time"),
        (
            call('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2, "num_frames": 0}}'),
            "wrong_arguments",
        ),
        (call("crop_video(", "tool_code"), "not_python"),
        (call("zoom(1, 2)", "tool_code"), "unknown_tool"),
        (call("crop_video(1, start_time=1)", "tool_code"), "wrong_arguments"),
        ("x\n</think>\n" + "\n".join([CALL] * 6), "over_cap"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_reason(text, reason):
    failed = [e for e in episode(text).executions if e.status != "ok"]
    assert {failure_of(execution) for execution in failed} == {reason}


@pytest.mark.parametrize(
    ("start", "end", "reason"),
    [
        (3, 1, "inverted_window"),
        (2, 2, "empty_window"),
        (99, 120, "outside_video"),
        (-3, -1, "outside_video"),
        ("soon", 3, "not_a_time"),
        (float("nan"), 3, "not_a_time"),
    ],
)
def test_a_window_that_cannot_be_read_has_a_reason(start, end, reason):
    with pytest.raises(TimeError) as caught:
        parse_window(start, end, 10.0)
    one = Execution(ToolCall("crop_video", {}), "error", str(caught.value))
    assert failure_of(one) == reason


def test_calls_that_the_episode_kept_from_running_have_reasons():
    one = ToolCall("crop_video", {})
    assert failure_of(Execution(one, "over_cap", NO_TURN_LEFT)) == "no_turn_left"
    assert failure_of(Execution(one, "error", NO_TOOL.format(name="crop_video"))) == "unknown_tool"
    assert failure_of(Execution(one, "error", "the disk is gone")) == OTHER


def test_a_step_by_hand():
    values = metrics(
        episode(f"x\n</think>\n{CALL}", "y\n</think>\n<answer>A</answer>"),
        episode("x\n<answer>A</answer>"),
        episode(call("nonsense"), "x\n</think>\n<answer>B"),
        episode("x\n</think>\nA", stop="no_answer"),
        version=3,
    )
    assert (values["unclosed/think"], values["unclosed/call"], values["unclosed/answer"]) == (0.25, 0, 0.25)
    assert values["fault/think_not_closed"] == values["fault/no_answer"] == 0.25
    assert values["fault/call_unreadable"] == values["fault/answer_not_closed"] == 0.25
    assert values["failures/not_json"] == values["calls/malformed"] == 0.25
    assert values["calls/run"] == 0.25
    assert values["compliance"] == 0.25
    assert values["staleness"] == 1
    counted = sum(values[f"failures/{reason}"] for reason in {name for _, name in FAILURES} | {OTHER})
    assert counted == values["calls/malformed"] + values["calls/error"] + values["calls/over_cap"]
