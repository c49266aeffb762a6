"""GRPO on the random tiny model after a loose SFT: what is rewarded grows, and what is not rewarded stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
from pathlib import Path

import pytest
import torch

from paravt.config import AnchoringConfig, BudgetConfig, OptimiserConfig, RewardConfig
from paravt.data.schema import TraceRow
from paravt.engines import TransformersEngine
from paravt.export import write_model_folder
from paravt.grpo import GRPOSetup, train
from paravt.model import load_encoder, load_model
from paravt.reporter import LogReporter
from paravt.rewards import Reward, score
from paravt.rollout import Rollout, Sample
from tests.tiny import VISUAL, build_tiny
from tests.training_world import (
    grpo_setup,
    loose_traces,
    question,
    run_sft,
    sft_setup,
    tool_trace,
    trace,
    write_clips,
)

SAMPLES = [question(number) for number in range(4)]


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> Path:
    """A model that answers A or B, with and without its tags: folder/model, beside the clips."""
    folder = tmp_path_factory.mktemp("loose")
    write_clips(folder)
    base = build_tiny(folder / "base")
    learning = OptimiserConfig(learning_rate=5e-3, schedule="cosine", warmup_share=0.1)
    setup = sft_setup(steps=60, batch_size=12, save_every=60, optimiser=learning)
    model, _ = run_sft(folder / "sft", base, loose_traces(), setup, folder)
    write_model_folder(model, base, folder / "model")
    return folder


def taught(base: Path, traces: list[TraceRow], folder: Path) -> Path:
    """`base` after SFT on the traces, each with 4 and with 2 overview frames: folder/model, beside clips."""
    folder.mkdir()
    write_clips(folder)
    few = [replace(row, frame_budget=2) for row in traces]
    both = [replace(row, id=f"{number}") for number, row in enumerate([*traces, *few])]
    learning = OptimiserConfig(learning_rate=5e-3, schedule="cosine", warmup_share=0.1)
    chosen = sft_setup(steps=70, batch_size=8, save_every=70, optimiser=learning)
    model, _ = run_sft(folder / "sft", base, both, chosen, folder)
    write_model_folder(model, base, folder / "model")
    return folder


@pytest.fixture(scope="module")
def calling(loose) -> Path:
    """A model taught to look before it answers in half of its traces: folder/model, beside the clips."""
    text = "look\n</think>\n<answer>A</answer>"
    made = [make(number, text) for number in range(4) for make in (tool_trace, trace)]
    return taught(loose / "base", made, loose / "calling")


@pytest.fixture(scope="module")
def both(loose) -> Path:
    """A model with both faults: it seldom looks, and it forgets closers. folder/model, beside the clips."""
    texts = ("look\n</think>\n<answer>A</answer>", "look\n<answer>A</answer>")
    made = [
        make(number, text)
        for number in range(4)
        for text in texts
        for make in (tool_trace, tool_trace, trace)
    ]
    return taught(loose / "base", made, loose / "both")


def setup(steps: int, learning_rate: float, **changes) -> GRPOSetup:
    optimiser = OptimiserConfig(learning_rate=learning_rate)
    sizes = {"prompts_per_step": 4, "group_size": 8, "save_every": steps}
    return replace(grpo_setup(steps=steps, optimiser=optimiser, **sizes), **changes)


def run(loose: Path, scratch: Path, chosen: GRPOSetup, score_fn: Callable | None = None):
    """The trained model and a function that averages a metric over steps [first, end)."""
    model, encoder = load_model(loose / "model"), load_encoder(loose / "model", VISUAL)
    engine = TransformersEngine(model, encoder.end_ids)
    train(model, None, engine, encoder, SAMPLES, chosen, LogReporter(), scratch, score_fn, video_root=loose)
    rows = [json.loads(line) for line in (scratch / "metrics.jsonl").read_text().splitlines()]

    def mean(name: str, first: int, end: int) -> float:
        values = [row[name] for row in rows[first:end] if name in row]
        return sum(values) / len(values)

    return model, mean


def equal_totals(rollout: Rollout, sample: Sample) -> Reward:
    """Every episode is worth the same; its structural sites are judged as ever."""
    return replace(score(rollout, sample, RewardConfig()), total=1.0)


def by_sight(rollout: Rollout, sample: Sample) -> Reward:
    """Right with 4 overview frames, or after a look; with 2 frames alone there is nothing to be seen."""
    right = float(rollout.call_count > 0 or rollout.frames_seen >= 4)
    return replace(score(rollout, sample, RewardConfig()), accuracy=right, tool=0.0, total=right)


def arm(steps: int, gating: bool, anchoring: bool) -> GRPOSetup:
    """One of the four arms; all else is equal."""
    budget = BudgetConfig(choices=[2, 4], gating=gating)
    anchors = AnchoringConfig(scope="site" if anchoring else "off", weight=1.0)
    return setup(steps, 1e-3, budget=budget, anchoring=anchors)


def test_anchoring_alone_teaches_closers_where_the_reward_teaches_nothing(loose, tmp_path):
    _, mean = run(loose, tmp_path / "on", arm(12, gating=False, anchoring=True), by_sight)
    assert mean("groups_without_spread", 0, 12) == 1  # nothing but anchors moves the weights
    assert mean("unclosed/think", 8, 12) < mean("unclosed/think", 0, 2) - 0.05
    _, mean = run(loose, tmp_path / "off", arm(3, gating=False, anchoring=False), by_sight)
    assert mean("groups_without_spread", 0, 3) == mean("update_skipped", 0, 3) == 1


def test_gating_alone_gives_groups_spread_where_the_largest_budget_gives_none(calling, tmp_path):
    seen = []

    def watched(rollout: Rollout, sample: Sample) -> Reward:
        seen.append(rollout.frames_seen)
        return by_sight(rollout, sample)

    _, mean = run(calling, tmp_path / "on", arm(4, gating=True, anchoring=False), watched)
    assert set(seen) == {2, 4}
    # few frames alone are not enough: a look pays
    assert mean("groups_without_spread", 0, 4) < 1
    assert mean("update_skipped", 0, 4) < 1
    seen.clear()
    _, mean = run(calling, tmp_path / "off", arm(3, gating=False, anchoring=False), watched)
    assert set(seen) == {4}
    assert mean("groups_without_spread", 0, 3) == mean("update_skipped", 0, 3) == 1


def test_vanilla_grows_the_answers_that_its_reward_names_and_nothing_without_one(loose, tmp_path):
    vanilla = arm(10, gating=False, anchoring=False)
    _, mean = run(loose, tmp_path / "on", vanilla)
    assert mean("reward/accuracy", 4, 10) > mean("reward/accuracy", 0, 2) + 0.15
    _, mean = run(loose, tmp_path / "off", arm(2, gating=False, anchoring=False), equal_totals)
    assert mean("update_skipped", 0, 2) == 1


def test_para_grpo_keeps_both_what_vanilla_loses(both, tmp_path):
    """With both parts it goes on looking and closes its tags; without either part it loses one of the two."""
    unclosed, calls = {}, {}
    for parts in ("gating anchoring", "gating", "anchoring"):
        chosen = arm(12, gating="gating" in parts, anchoring="anchoring" in parts)
        _, mean = run(both, tmp_path / parts, chosen, by_sight)
        unclosed[parts], calls[parts] = mean("unclosed/think", 6, 12), mean("calls/run", 6, 12)
    assert unclosed["gating anchoring"] < unclosed["gating"] - 0.15
    assert calls["gating anchoring"] > calls["anchoring"] + 0.1


def test_reward_accuracy_and_format_grow(loose, tmp_path):
    _, mean = run(loose, tmp_path, setup(21, 1e-3))
    assert mean("reward/total", 14, 21) > mean("reward/total", 0, 3) + 0.3
    assert mean("reward/accuracy", 14, 21) > mean("reward/accuracy", 0, 3) + 0.25
    assert mean("site/think", 14, 21) > mean("site/think", 0, 3) + 0.1
    assert mean("ratio_before", 0, 1) == pytest.approx(1, abs=0.01)
    assert mean("staleness", 0, 21) == 0


def test_anchors_alone_teach_the_format(loose, tmp_path):
    chosen = setup(12, 1e-3, anchoring=AnchoringConfig(scope="site", weight=1.0))
    _, mean = run(loose, tmp_path, chosen, equal_totals)
    assert mean("groups_without_spread", 0, 12) == 1
    assert mean("update_skipped", 0, 12) == 0
    assert mean("site/think", 4, 12) > mean("site/think", 0, 2) + 0.05


def test_no_spread_and_no_anchors_move_no_weight(loose, tmp_path):
    before = load_model(loose / "model").state_dict()
    chosen = setup(3, 1e-3, anchoring=AnchoringConfig(scope="off"))
    model, mean = run(loose, tmp_path, chosen, equal_totals)
    assert mean("update_skipped", 0, 3) == 1
    assert mean("loss/policy", 0, 3) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_every_other_choice_of_the_objective_trains_too(loose, tmp_path):
    chosen = setup(14, 7e-4)
    grpo = chosen.grpo.model_copy(
        update={
            "kl": "reward",
            "normaliser": "sequence",
            "importance": "geometric",
            "importance_action": "clamp",
            "spread": "leave_one_out",
            "entropy_weight": 1e-3,
            "train_subagents": True,
            "mask_truncated": True,
        }
    )
    _, mean = run(loose, tmp_path, replace(chosen, grpo=grpo))
    assert mean("reward/total", 8, 14) > mean("reward/total", 0, 3) + 0.2
