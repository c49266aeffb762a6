"""What a trace leaves to be learned: the teacher's tokens, after the very prefix that episodes force."""

from __future__ import annotations

from dataclasses import replace
import json

import pytest

from paravt.config import EpisodeConfig
from paravt.prompting import main_prefix
from paravt.sft.data import gold_text, read_frames
from paravt.video import Video
from tests.tiny import build_tiny, tiny_encoder
from tests.training_world import loose_traces, report_trace, run_sft, sft_setup, trace, write_clips

REST = "look\n</think>\n<answer>A</answer>"


@pytest.mark.parametrize("opening", ["<think>\n", "<think>", ""])
@pytest.mark.parametrize("force", [True, False])
def test_a_turn_is_learned_with_one_think_however_its_trace_opens(opening, force):
    config = EpisodeConfig(mode="agentic", force_think=force)
    assert main_prefix(config) + gold_text(opening + REST, config) == "<think>\n" + REST


def test_a_direct_turn_is_learned_as_it_stands():
    assert gold_text("<answer>A</answer>", EpisodeConfig(mode="direct")) == "<answer>A</answer>"


def test_a_window_outside_its_video_leaves_the_trace_out_and_says_so(tmp_path):
    write_clips(tmp_path)
    lost = replace(report_trace(10), window_s=(900.0, 903.0))
    traces = [lost, *loose_traces()[:7]]
    setup = sft_setup(steps=2, batch_size=4)
    run_sft(tmp_path / "sft", build_tiny(tmp_path / "base"), traces, setup, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["traces_left_out"] == 1


def test_a_reader_that_gives_more_frames_than_the_budget_is_an_error(tmp_path, monkeypatch):
    write_clips(tmp_path)
    sample = Video.sample
    monkeypatch.setattr(Video, "sample", lambda self, n: sample(self, n + 1))
    with pytest.raises(RuntimeError, match="trace t0: 5 frames were decoded, 4 are allowed"):
        read_frames(tiny_encoder(), trace(0, REST), tmp_path)
