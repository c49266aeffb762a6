"""The dispatch benchmark: each way of dispatch looks at the same given windows; figures are counted."""

from __future__ import annotations

import pytest

from bench.dispatch import (
    WAYS,
    Forced,
    agent,
    figures,
    first_turns,
    markdown,
    measure,
    picture,
    questions,
    ratio,
    windows,
)
from paravt.agent import run_episodes
from paravt.data.traces import main_trace
from stages.params import check, compose
from tests.fakes import ScriptedEngine
from tests.tiny import tiny_encoder

PARAMS = check(compose(["scale=tiny"]))


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return questions(PARAMS, tmp_path_factory.mktemp("videos"), 1)


def forced() -> Forced:
    """Sub-agents and the answer come from a script."""
    inner = ScriptedEngine(
        tiny_encoder(),
        lambda prompt: "red circle" if prompt.is_subagent else "seen\n</think>\n<answer>A</answer>",
    )
    return Forced(inner, tiny_encoder())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
def test_the_given_windows_run_and_the_rest_is_the_models(asked, way, count):
    scene, sample, overview_s = asked[0]
    looks = windows(scene, sample, overview_s, count)
    trace = main_trace(scene, sample, overview_s, use_tool=True)
    assert len(looks) == count and trace.looks[0] in looks
    engine = forced()
    engine.give(first_turns(trace.turns[0], looks, way))
    [rollout] = run_episodes(engine, [sample], agent(PARAMS, engine.encoder, way, count))
    found = [execution.window_s for execution in rollout.executions]
    assert found == [pytest.approx((look.start_s, look.end_s), abs=0.051) for look in looks]
    assert len(rollout.turns) == (count + 1 if way == "sequential" else 2)
    assert len(rollout.subagents) == (0 if way == "frames" else count)
    assert rollout.answer == "A" and engine.given == []
    with pytest.raises(RuntimeError, match=f"{count} windows ran"):
        figures(rollout, sample, count + 1)


def test_rows_ratios_and_page(asked):
    rows = measure(PARAMS, forced(), asked, most=2, rounds=2)
    assert [(row["dispatch"], row["windows"], row["episodes"]) for row in rows] == [
        (way, count, 2) for way in sorted(WAYS) for count in (1, 2)
    ]
    made = [{"dispatch": way, "windows": n, "wall_s": 0.5 + n} for way in WAYS for n in (1, 5)]
    assert ratio(made, "parallel", 5, "wall_s") == round(5.5 / 1.5, 2)
    assert ratio(rows, "parallel", 5, "wall_s") is None
    page = markdown(rows, "d.png", "python -m bench.dispatch", "tiny-base")
    assert page.count("\n| ") == 2 + len(rows)  # with the head and its rule
    assert "![" in page
    assert picture(rows).startswith(b"\x89PNG")
