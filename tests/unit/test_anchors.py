"""Anchors: which tokens a structural site owns, and what is added to them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from paravt.config import AnchoringConfig, RewardConfig
from paravt.grpo.anchors import anchor_group, sequence_bonus, site_tokens, token_spans
from paravt.protocol import THINK_PREFIX, parse_turn
from paravt.rewards import score
from paravt.rollout import EpisodeTurn, Rollout, Sample
from tests.tiny import tiny_encoder

SAMPLE = Sample("s", "v.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1.0, "end_time": 2.0}}\n</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "crop_video"\n</tool_call>'
GOOD = "look\n</think>\n<answer>A</answer>"
SITE = AnchoringConfig(scope="site", weight=0.5)


def episode(*texts: str, prefix: str = THINK_PREFIX, cut: bool = False) -> Rollout:
    """An episode that wrote `texts` after the forced prefix; `cut`: the last turn has no end token."""
    encoder = tiny_encoder()
    main = encoder.start("You answer.", None, "v.mp4", "Which shape?", prefix)
    turns = []
    for number, text in enumerate(texts):
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        last = number == len(texts) - 1
        if not (cut and last):
            ids.append(encoder.end_id)
        first = len(main.ids)
        main.append_sampled(ids, [-1.0] * len(ids))
        whole = prefix + text
        turns.append(EpisodeTurn(whole, parse_turn(whole), span=(first, len(main.ids))))
        if not last:
            encoder.add_tool_results(main, ["a report"], "v.mp4", prefix)
    answer = turns[-1].parsed.answer
    return Rollout("s", turns, main, [], answer, "answered" if answer else "no_answer", 4)


def pieces(rollout: Rollout, positions: list[int]) -> list[str]:
    """Each token's own text; the end token is written out."""
    ids = [rollout.main.ids[i] for i in positions]
    return [tiny_encoder().tokenizer.convert_tokens_to_string([token]) for token in _names(ids)]


def _names(ids: list[int]) -> list[str]:
    return tiny_encoder().tokenizer.convert_ids_to_tokens(ids)


def owned(rollout: Rollout, turn: int = 0) -> dict[str, list[str]]:
    return {k: pieces(rollout, v) for k, v in site_tokens(tiny_encoder(), rollout, turn).items()}


def anchors(*rollouts: Rollout, config: AnchoringConfig = SITE) -> list[np.ndarray]:
    rewards = [score(rollout, SAMPLE, RewardConfig()) for rollout in rollouts]
    made = anchor_group(tiny_encoder(), rollouts, rewards, config)
    return [anchored.advantages for anchored in made]


def values(rollout: Rollout, added: np.ndarray) -> dict[str, float]:
    """What was added, by the text of the run of tokens that got it; runs of one value are joined."""
    found: dict[str, float] = {}
    where = np.flatnonzero(added)
    for part in np.split(where, np.flatnonzero((np.diff(where) > 1) | (np.diff(added[where]) != 0)) + 1):
        if len(part):
            found["".join(pieces(rollout, list(part)))] = round(float(added[part[0]]), 9)
    return found


def test_tags_that_are_split_over_several_tokens_are_owned_whole():
    got = owned(episode(GOOD))
    assert got["think"] == ["</think>"]
    assert "".join(got["answer"]).replace("\n", "") == "<answer></answer>"
    assert len(got["answer"]) > 4  # the tokenizer splits both tags
    assert got["call"] == []


def test_a_token_that_a_tag_shares_with_other_text_belongs_to_it():
    # The byte-level BPE may join ">" with the line break after it, or "A" with "<".
    rollout = episode("x\n</think>\n<answer>\nA</answer>\n")
    text = "".join(owned(rollout)["answer"])
    assert text.startswith("<answer>") and "</answer>" in text


def test_all_calls_of_a_turn_are_one_site():
    got = owned(episode(f"look\n</think>\n{CALL}\n{CALL}", GOOD))
    assert got["call"] == ["<tool_call>", "</tool_call>"] * 2
    assert got["think"] == ["</think>"]


def test_the_forced_opener_was_not_sampled_and_a_sampled_one_is_owned():
    assert owned(episode(GOOD))["think"] == ["</think>"]
    assert owned(episode("<think>\n" + GOOD, prefix=""))["think"] == ["<think>", "</think>"]


def test_tags_inside_a_closed_think_are_text():
    got = owned(episode("I could write <answer>B</answer> or <tool_call>\n</think>\n<answer>A</answer>"))
    assert "".join(got["answer"]) == "<answer></answer>"
    assert got["call"] == []


@pytest.mark.parametrize(
    ("text", "kind", "charged"),
    [
        ("look", "think", "<|im_end|>"),
        (f"look {CALL}", "think", "<tool_call>"),
        ("look\n</think>\n<answer>A", "answer", "<|im_end|>"),
        ("look\n</think>\nA", "answer", "<|im_end|>"),
        (f"look\n</think>\n{CALL[:-13]}", "call", "<|im_end|>"),
        (f"look\n</think>\n{CALL[:-12]}{CALL}", "call", "<tool_call>"),
    ],
)
def test_a_missing_closer_is_charged_where_its_segment_ended(text, kind, charged):
    rollout = episode(text)
    positions = site_tokens(tiny_encoder(), rollout, 0)[kind]
    assert charged in pieces(rollout, positions)
    if charged == "<|im_end|>":
        assert pieces(rollout, positions)[-1] == charged


def test_a_missing_think_closer_before_a_split_tag_is_charged_to_its_first_token():
    rollout = episode("look <answer>A</answer>")
    got = site_tokens(tiny_encoder(), rollout, 0)
    assert len(got["think"]) == 1
    assert got["think"][0] == got["answer"][0]


def test_a_turn_cut_at_its_limit_is_charged_at_its_last_token():
    rollout = episode("look at the red", cut=True)
    got = site_tokens(tiny_encoder(), rollout, 0)
    last = len(rollout.main.ids) - 1
    assert got["think"] == got["answer"] == [last]
    assert pieces(rollout, [last]) != ["<|im_end|>"]


def test_a_think_that_was_never_begun_is_charged_to_the_first_token():
    rollout = episode("A it is", prefix="")
    assert site_tokens(tiny_encoder(), rollout, 0)["think"] == [rollout.turns[0].span[0]]


def test_outcome_minus_rate_by_hand():
    # Thinks: 3 of 4 closed. Answers: 2 of 4 closed.
    whole, other = episode(GOOD), episode(GOOD)
    no_closer = episode("look\n</think>\n<answer>A")
    no_think = episode("look <answer>A")
    added = anchors(whole, other, no_closer, no_think)
    assert values(whole, added[0]) == {"</think>": 0.125, "<answer>": 0.25, "</answer>": 0.25}
    assert values(no_closer, added[2]) == {"</think>": 0.125, "<answer>": -0.25, "<|im_end|>": -0.25}
    # The first token of the answer tag carries its own site's share and the missing think closer's.
    first, rest = values(no_think, added[3]), -0.25
    assert first["<|im_end|>"] == rest
    assert sorted(first.values()) == pytest.approx([-0.375 - 0.25, rest, rest])


def test_an_episode_is_not_punished_for_tags_that_it_wrote_well():
    bad_answer = episode(f"look\n</think>\n{CALL}", "look\n</think>\nA")
    good = episode(f"look\n</think>\n{CALL}", GOOD)
    added = anchors(bad_answer, good)
    assert values(bad_answer, added[0]) == {"<|im_end|>": -0.25}
    assert values(good, added[1]) == {"<answer>": 0.25, "</answer>": 0.25}


def test_a_call_that_cannot_be_read_pays_on_its_own_tags():
    bad, good = episode(f"look\n</think>\n{BAD_CALL}", GOOD), episode(f"look\n</think>\n{CALL}", GOOD)
    added = anchors(bad, good)
    assert values(bad, added[0]) == {"<tool_call>": -0.25, "</tool_call>": -0.25}
    assert values(good, added[1]) == {"<tool_call>": 0.25, "</tool_call>": 0.25}


def test_calling_or_not_calling_is_nothing_that_anchors_see():
    caller, skipper = episode(f"look\n</think>\n{CALL}", GOOD), episode(GOOD)
    assert not any(added.any() for added in anchors(caller, skipper))


@pytest.mark.parametrize("text", [GOOD, "look\n</think>\nA", "look"])
def test_a_group_of_equal_outcomes_gives_exactly_zero(text):
    assert not any(added.any() for added in anchors(*[episode(text)] * 7))


def test_off_and_sequence_add_nothing_to_tokens():
    group = [episode(GOOD), episode("look")]
    for scope in ("off", "sequence"):
        assert not any(added.any() for added in anchors(*group, config=AnchoringConfig(scope=scope)))


def test_structural_puts_one_normalised_score_on_all_structural_tokens():
    group = [episode(GOOD), episode("look\n</think>\nA")]  # format 1 and 1/2: advantages +-1/sqrt(2)
    added = anchors(*group, config=AnchoringConfig(scope="structural", weight=1.0))
    score_ = round(1 / np.sqrt(2), 9)
    assert values(group[0], added[0]) == {"</think>": score_, "<answer>": score_, "</answer>": score_}
    assert values(group[1], added[1]) == {"</think>": -score_, "<|im_end|>": -score_}


def test_sequence_is_the_released_scalar_and_is_paid_once():
    config = AnchoringConfig(scope="sequence", weight=0.5)
    long = "I look at the red part.\n</think>\n<answer>A</answer>"
    rules = RewardConfig(format="published_suffix")
    assert sequence_bonus(episode(long), config, rules) == pytest.approx(0.35)
    assert sequence_bonus(episode("I look at the red part."), config, rules) == pytest.approx(-0.15)
    assert sequence_bonus(episode(long), config, RewardConfig(format="published_para")) == 0.0
    assert sequence_bonus(episode(long), SITE, rules) == 0.0


def test_anchors_never_touch_what_was_not_sampled():
    rollout = episode(f"look\n</think>\n{BAD_CALL}", f"look\n</think>\n{CALL}", "look <answer>A")
    added = anchors(rollout, episode(GOOD))[0]
    assert added.any()
    assert not added[np.asarray(rollout.main.loss_mask) == 0].any()


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab <>/\n{}é視😀answerthink"), max_size=40), st.booleans())
def test_token_spans_cover_the_decoded_text_in_order(text, ended):
    encoder = tiny_encoder()
    ids = encoder.tokenizer.encode(text, add_special_tokens=False) + [encoder.end_id] * ended
    spans = token_spans(encoder, ids)
    assert len(spans) == len(ids)
    joined = "".join(encoder.decode(ids)[a:b] for a, b in spans)
    assert joined == encoder.decode(ids) == text
    assert all(a <= b and b == c for (a, b), (c, _) in zip(spans, spans[1:], strict=False))
    if ended:
        assert spans[-1] == (len(text), len(text))


def test_token_spans_survive_bytes_that_are_no_text():
    encoder = tiny_encoder()
    smile = encoder.tokenizer.encode("😀", add_special_tokens=False)
    assert len(smile) == 4
    ids = smile[:2] + encoder.tokenizer.encode("ab</think>", add_special_tokens=False)
    text = encoder.decode(ids)
    (start, end) = token_spans(encoder, ids)[-1]
    assert text[start:end] == "</think>"
