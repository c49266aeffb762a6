"""PARA-GRPO with rollouts of a real vLLM server."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
import torch

from paravt.config import OptimiserConfig
from paravt.engines import TransformersEngine
from paravt.engines.factory import make_engine
from paravt.grpo import GRPOSetup, train
from paravt.model import load_model
from paravt.reporter import LogReporter
from tests.vllm.conftest import BASE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STEPS = 4


def run(engine, model, encoder, params, samples, scratch, **grpo) -> list[dict]:
    """The metrics of each step. The learning rate is high, so that a missed sync shows in the next ratio."""
    few = {
        "steps": STEPS,
        "prompts_per_step": 2,
        "group_size": 4,
        "save_every": STEPS,
        "optimiser": OptimiserConfig(learning_rate=1e-3),
    }
    grpo = params.grpo.model_copy(update=few | grpo)
    changes = {"grpo": grpo, "budget": params.budget.model_copy(update={"choices": [4, 8]})}
    setup = GRPOSetup.of(params.model_copy(update=changes))
    train(model, None, engine, encoder, samples, setup, LogReporter(), scratch)
    return [json.loads(line) for line in (scratch / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("transfer", ["disk", "gloo"])
def test_each_step_samples_with_the_weights_of_the_step_before(
    transfer, named, params, encoder, limits, samples, tmp_path
):
    config = params.engine.model_copy(update={"weight_transfer": transfer})
    with make_engine(config, BASE, encoder, limits, log_folder=tmp_path / "logs") as engine:
        follow(engine, encoder, params, samples, tmp_path)
    assert (tmp_path / "engine-weights").exists() == (transfer == "disk")


def follow(engine, encoder, params, samples, tmp_path) -> None:
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


def test_it_learns_as_with_the_transformers_engine(engine, encoder, params, samples, tmp_path):
    """The same prompts again and again: the reward grows by as much, whoever samples."""
    longer = {
        "steps": 16,
        "prompts_per_step": 2,
        "group_size": 8,
        "optimiser": OptimiserConfig(learning_rate=1e-4),
    }
    theirs = run(engine, load_model(BASE), encoder, params, samples[:2], tmp_path / "vllm", **longer)
    model = load_model(BASE)
    own = TransformersEngine(model, encoder.end_ids)
    ours = run(own, model, encoder, params, samples[:2], tmp_path / "transformers", **longer)

    def gain(steps: list[dict]) -> float:
        rewards = [step["reward/total"] for step in steps]
        return sum(rewards[-4:]) / 4 - sum(rewards[:4]) / 4

    print("gain", gain(theirs), gain(ours), [round(step["reward/total"], 2) for step in theirs])
    assert gain(theirs) > 0.2 and gain(ours) > 0.2
    assert gain(theirs) == pytest.approx(gain(ours), abs=0.5)
    assert all(step["ratio_before"] == pytest.approx(1, abs=0.02) for step in theirs)


def test_rollouts_ahead_survive_a_server_that_dies(params, encoder, limits, samples, tmp_path):
    """Killed while it rolls out ahead: started again, sent its weights, asked again; all is counted."""
    config = params.engine.model_copy(update={"weight_transfer": "gloo"})
    with make_engine(config, BASE, encoder, limits, log_folder=tmp_path / "logs") as engine:
        generate, calls = engine.generate, []

        def killing(requests):
            calls.append(len(requests))
            if len(calls) == 4:
                [server] = engine._servers
                threading.Timer(0.05, os.killpg, (server.process_group, signal.SIGKILL)).start()
            return generate(requests)

        engine.generate = killing
        model = load_model(BASE)
        steps = run(engine, model, encoder, params, samples, tmp_path / "run", staleness=1)
        print(dict(engine.counts), [(step["staleness"], step["ratio_before"]) for step in steps])
        assert engine.counts["server restarted"] == 1
        assert engine.counts["weights loaded anew"] == 1
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert all(step["left_out/failed"] == 0 for step in steps)
        assert steps[0]["staleness"] == 0 and all(step["staleness"] <= 1 for step in steps)
        assert max(step["staleness"] for step in steps) == 1
        assert steps[0]["ratio_before"] == pytest.approx(1, abs=0.02)
