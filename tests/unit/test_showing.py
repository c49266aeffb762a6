"""An episode token by token: texts, colours, the two parts of the credit, and what is printed."""

from __future__ import annotations

from dataclasses import replace
import io
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from rich.console import Console

from paravt import cli
from paravt.config import AnchoringConfig, GRPOConfig, OptimiserConfig, RewardConfig
from paravt.grpo.batch import Group
from paravt.grpo.credit import group_credit
from paravt.protocol import THINK_PREFIX, parse_turn
from paravt.rewards import score
from paravt.rollout import EpisodeRow, EpisodeTurn, Rollout, Sample, read_episodes, write_jsonl
from paravt.showing import Member, episode_view, token_style, token_texts, tokens_text
from tests.tiny import tiny_encoder, tiny_folder

SAMPLE = Sample("s", "v.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
CONFIG = GRPOConfig(steps=1, prompts_per_step=1, optimiser=OptimiserConfig(learning_rate=1e-3))
GOOD, LOOSE = "x\n</think>\n<answer>A</answer>", "x\n</think>\nA"


def episode(text: str, stop: str = "answered") -> Rollout:
    encoder = tiny_encoder()
    main = encoder.start("You answer.", None, "v.mp4", "Which shape?", THINK_PREFIX)
    first = len(main.ids)
    encoder.add_gold(main, text)
    turn = EpisodeTurn(THINK_PREFIX + text, parse_turn(THINK_PREFIX + text), span=(first, len(main.ids)))
    return Rollout("s", [turn], main, [], turn.parsed.answer, stop, 4, frames_seen=4)


def members(texts, anchoring=AnchoringConfig(weight=0.5), **changes) -> list[Member]:  # noqa: B008 - frozen
    rollouts = [episode(text) for text in texts]
    rewards = [score(rollout, SAMPLE, RewardConfig()) for rollout in rollouts]
    group = Group(SAMPLE, 0, 4, rollouts, rewards)
    credits = group_credit(tiny_encoder(), group, CONFIG.model_copy(update=changes), anchoring)
    pairs = zip(rollouts, rewards, credits, strict=True)
    return [Member(i, rollout, reward, credit) for i, (rollout, reward, credit) in enumerate(pairs)]


def printed(view, **options) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=100, highlight=False, markup=False, **options).print(view)
    return buffer.getvalue()


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_token_texts_join_to_the_decoded_text(text):
    tokenizer = tiny_encoder().tokenizer
    ids = [*tokenizer.encode(f"<think>{text}</think>", add_special_tokens=False), tiny_encoder().end_id]
    assert "".join(token_texts(tiny_encoder(), ids)) == tokenizer.decode(ids)


def test_the_two_parts_of_the_credit_by_hand():
    # Totals 2, 1/2: advantages +-sqrt(1/2). Half of the answers are right: anchors +-0.5 x 0.5.
    good, loose = members([GOOD, LOOSE])
    sampled = np.asarray(good.rollout.main.loss_mask, dtype=bool)
    assert good.credits[0].group[sampled] == pytest.approx(math.sqrt(0.5))
    assert not good.credits[0].group[~sampled].any()
    texts = token_texts(tiny_encoder(), good.rollout.main.ids)
    anchored = {texts[i]: good.credits[0].anchor[i] for i in np.flatnonzero(good.credits[0].structural)}
    assert anchored.pop("</think>") == 0  # all thinks are right: no credit for it
    assert set(np.round(list(anchored.values()), 12)) == {0.25}
    [charged] = np.flatnonzero(loose.credits[0].anchor)
    assert loose.rollout.main.ids[charged] == tiny_encoder().end_id
    assert loose.credits[0].anchor[charged] == pytest.approx(-0.25)


def test_an_episode_that_does_not_train_has_no_credit():
    rollouts = [episode(GOOD), episode(GOOD, "failed")]
    rewards = [score(rollout, SAMPLE, RewardConfig()) for rollout in rollouts]
    found = group_credit(tiny_encoder(), Group(SAMPLE, 0, 4, rollouts, rewards), CONFIG, AnchoringConfig())
    assert [credit[0].trained for credit in found] == [True, False]


def test_colours_say_mask_sign_size_and_structure():
    assert token_style(False, 1.0, False, 1.0).color.name == "grey50"
    assert token_style(True, 0.0, False, 1.0).bgcolor is None
    weak, strong = token_style(True, 0.1, False, 1.0), token_style(True, 1.0, True, 1.0)
    assert weak.bgcolor.name == "#16341c" and not weak.underline
    assert strong.bgcolor.name == "#2aa84a" and strong.underline
    assert token_style(True, -1.0, False, 1.0).bgcolor.name == "#c92d2d"


def test_each_token_has_its_own_style():
    good = members([GOOD, LOOSE])[0]
    text = tokens_text(tiny_encoder(), good.rollout.main, good.credits[0], largest=1.0)
    by_text = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert by_text["</think>"].underline and by_text["</think>"].bgcolor
    assert by_text["<think>"].color.name == "grey50"  # forced, so not sampled
    assert text.plain.endswith("<|im_end|>")


def test_the_view_holds_rewards_reasons_anchors_and_the_group():
    group = members([GOOD, LOOSE])
    text = printed(episode_view(tiny_encoder(), group, 1))
    for words in (
        "episode 1: s, 4 frames seen (budget 4)",
        "reward   total 0.500 = accuracy 0.000, format 0.500, tool 0.000",
        "format: no answer block (turn 0)",
        "advantage of the total in its group -0.7071",
        "-0.2500",
        "structural tokens",
        "not in the loss",
    ):
        assert words in text
    assert len([line for line in text.splitlines() if line.startswith(">")]) == 1
    assert max(map(len, text.splitlines())) <= 100  # wrapped
    assert "\x1b[" not in text
    assert "48;2;" in printed(
        episode_view(tiny_encoder(), group, 1), force_terminal=True, color_system="truecolor"
    )


def test_the_command_shows_a_file_with_and_without_its_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rollouts = [episode(GOOD), episode(LOOSE), replace(episode(GOOD), sample_id="t")]
    other = replace(SAMPLE, id="t")
    rows = [EpisodeRow(r, {"s": SAMPLE, "t": other}[r.sample_id], str(tiny_folder())) for r in rollouts]
    write_jsonl("full.jsonl", rows)
    write_jsonl("bare.jsonl", rollouts)
    write_jsonl("table.jsonl", [SAMPLE, other])
    assert [row.sample for row in read_episodes("full.jsonl")] == [SAMPLE, SAMPLE, other]
    assert [row.rollout.sample_id for row in read_episodes("full.jsonl")] == ["s", "s", "t"]

    assert cli.main(["rollout", "show", "full.jsonl", "--index", "1", "--width", "100"]) == 0
    full = capsys.readouterr().out
    assert "advantage of the total in its group -0.7071" in full and "group" in full
    bare = ["rollout", "show", "bare.jsonl", "--index", "1", "--width", "100"]
    assert cli.main(bare) == 0
    out, err = capsys.readouterr()
    assert "turn 1" in out and "give --model to see tokens" in err
    assert cli.main([*bare, "--model", str(tiny_folder())]) == 0
    assert "give --table" in capsys.readouterr().out
    assert cli.main([*bare, "--model", str(tiny_folder()), "--table", "table.jsonl"]) == 0
    assert capsys.readouterr().out == full
    assert cli.main(["rollout", "show", "full.jsonl", "--index", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sample"]["id"] == "t"
