"""What a trace leaves to be learned: the teacher's tokens, after the very prefix that episodes force."""

from __future__ import annotations

import pytest

from paravt.config import EpisodeConfig
from paravt.prompting import main_prefix
from paravt.sft.data import gold_text

REST = "look\n</think>\n<answer>A</answer>"


@pytest.mark.parametrize("opening", ["<think>\n", "<think>", ""])
@pytest.mark.parametrize("force", [True, False])
def test_a_turn_is_learned_with_one_think_however_its_trace_opens(opening, force):
    config = EpisodeConfig(mode="agentic", force_think=force)
    assert main_prefix(config) + gold_text(opening + REST, config) == "<think>\n" + REST


def test_a_direct_turn_is_learned_as_it_stands():
    assert gold_text("<answer>A</answer>", EpisodeConfig(mode="direct")) == "<answer>A</answer>"
