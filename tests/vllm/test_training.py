"""PARA-GRPO with rollouts of a real vLLM server."""

from __future__ import annotations

import json

import pytest
import torch

from paravt.config import OptimiserConfig
from paravt.engines import TransformersEngine
from paravt.grpo import GRPOSetup, train
from paravt.model import load_model
from paravt.reporter import LogReporter
from tests.vllm.conftest import BASE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STEPS = 4


def run(engine, model, encoder, params, samples, scratch) -> list[dict]:
    """The metrics of each step. The learning rate is high, so that a missed sync shows in the next ratio."""
    grpo = params.grpo.model_copy(
        update={
            "steps": STEPS,
            "prompts_per_step": 2,
            "group_size": 4,
            "save_every": STEPS,
            "optimiser": OptimiserConfig(learning_rate=1e-3),
        }
    )
    changes = {"grpo": grpo, "budget": params.budget.model_copy(update={"choices": [4, 8]})}
    setup = GRPOSetup.of(params.model_copy(update=changes))
    train(model, None, engine, encoder, samples, setup, LogReporter(), scratch)
    return [json.loads(line) for line in (scratch / "metrics.jsonl").read_text().splitlines()]


def test_each_step_samples_with_the_weights_of_the_step_before(engine, encoder, params, samples, tmp_path):
    model = load_model(BASE)
    steps = run(engine, model, encoder, params, samples, tmp_path)
    print([(step["ratio_before"], step["mismatch_kl"], step["update_skipped"]) for step in steps])
    assert sum(not step["update_skipped"] for step in steps) >= 2
    for step in steps:
        assert step["ratio_before"] == pytest.approx(1, abs=0.02)
        assert step["mismatch_kl"] < 1e-6  # 5e-4 and more if but one layer's weights do not arrive
        assert step["staleness"] == 0
    assert engine.weight_version == STEPS
    before = load_model(BASE).state_dict()
    moved = max((weight - before[name]).abs().max() for name, weight in model.state_dict().items())
    assert moved > 1e-3
    assert not engine.counts


def test_the_first_step_rewards_as_with_the_transformers_engine(engine, encoder, params, samples, tmp_path):
    """Other draws from the same distribution: the first step's figures are of the same kind, not the same."""
    theirs = run(engine, load_model(BASE), encoder, params, samples, tmp_path / "vllm")[0]
    model = load_model(BASE)
    own = TransformersEngine(model, encoder.end_ids)
    ours = run(own, model, encoder, params, samples, tmp_path / "transformers")[0]
    assert theirs.keys() == ours.keys()
    assert theirs["episodes"] == ours["episodes"] == 8
    assert theirs["entropy"] == pytest.approx(ours["entropy"], rel=0.5)
    assert torch.isfinite(torch.tensor(list(theirs.values()))).all()
