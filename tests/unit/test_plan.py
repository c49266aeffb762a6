"""The memory plan: figures worked by hand, layouts that fit, what does not."""

from __future__ import annotations

import json

import pytest

from paravt.cli import main
from paravt.plan import GIB, LAYOUTS, describe, longest_episode, make_plan, to_json
from stages.params import ROOT, ParamsError, check, compose


def params(layout: str = "8x80", *more: str):
    return check(compose(["scale=paravt_8b", f"layout={layout}", *more]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_fits_its_gpus(layout):
    plan = make_plan(params(layout), LAYOUTS[layout])
    assert plan.fits
    assert all(0.3 < use.total_gib / use.has_gib < 1 for use in plan.uses)
    assert all(1 < plan.steps_per_hour(stage) < 1000 for stage in ("sft", "para_grpo"))


def test_parts_by_hand():
    sft, rl, server = make_plan(params(), LAYOUTS["8x80"]).uses
    text, vision = 8_190_735_360, 576_388_336
    assert sft.gib["weights"] == pytest.approx((4 * text + 2 * vision) / 8 / GIB)
    assert sft.gib["optimiser"] == pytest.approx(8 * text / 8 / GIB)
    assert rl.gib["gradients"] == pytest.approx(4 * text / 7 / GIB)
    assert "reference" in rl.gib and "reference" not in sft.gib
    # inputs of 36 layers: 16,384 tokens of 4096 numbers in 2 bytes
    assert rl.gib["activations"] > 36 * 16_384 * 4096 * 2 / GIB
    assert server.gib["weights"] == pytest.approx(2 * (text + vision) / GIB)
    assert sum(server.gib.values()) == pytest.approx(0.85 * 79.2)
    # 2 x 36 layers x 8 heads x 128 in 2 bytes are 144 KiB a token
    assert server.gib["KV cache"] * GIB / 147_456 == pytest.approx(342_170, abs=2)


def test_rollouts_ahead_cost_the_longer_side_alone():
    ahead = make_plan(params(), LAYOUTS["8x80"])
    in_turn = make_plan(params("8x80", "grpo.staleness=0"), LAYOUTS["8x80"])
    seconds = ahead.seconds["para_grpo"]
    sides = sum(seconds[part] for part in ("video", "read", "write")), seconds["train"] + seconds["sync"]
    assert ahead.steps_per_hour("para_grpo") == pytest.approx(3600 / max(sides))
    assert in_turn.steps_per_hour("para_grpo") == pytest.approx(3600 / sum(sides))
    assert ahead.disk_gib["models"] - in_turn.disk_gib["models"] == pytest.approx(2 * 2 * 8_767_123_696 / GIB)


@pytest.mark.parametrize("transfer", ["gloo", "nccl"])
def test_weights_that_are_sent_take_no_disk(transfer):
    """17.5 GB written and read at 2 GB/s, or copied three times at 5 GB/s."""
    disk = make_plan(params(), LAYOUTS["8x80"])
    sent = make_plan(params("8x80", f"engine.weight_transfer={transfer}"), LAYOUTS["8x80"])
    assert disk.seconds["para_grpo"]["sync"] == pytest.approx(2 * 17.534 / 2, rel=1e-4)
    assert sent.seconds["para_grpo"]["sync"] == pytest.approx(3 * 17.534 / 5, rel=1e-4)
    assert disk.disk_gib["models"] - sent.disk_gib["models"] == pytest.approx(3 * 17.534e9 / GIB, rel=1e-4)


def test_nccl_needs_a_gpu_for_each_side():
    with pytest.raises(ParamsError, match="servers and trainer share GPU 0, which NCCL refuses"):
        params("1x80", "engine.weight_transfer=nccl")
    assert params("1x80", "engine.weight_transfer=nccl", "engine.first_gpu=1").engine.first_gpu == 1
    assert params("1x80", "engine.weight_transfer=gloo").engine.weight_transfer == "gloo"


def test_visual_tokens_are_those_of_the_encoder():
    """64 frames of 224 x 224: 49 tokens each, and the time before each."""
    plan = make_plan(params(), LAYOUTS["8x80"])
    assert plan.visual_tokens == {k: k * 58 for k in (4, 8, 16, 32, 64)}
    assert longest_episode(params()) > plan.visual_tokens[64] + 4 * 2048


def test_adapters_on_one_gpu_hold_no_reference_and_share_it_with_the_server():
    plan = make_plan(params("1x80"), LAYOUTS["1x80"])
    together = next(use for use in plan.uses if "server" in use.gib)
    assert "reference" not in together.gib and together.gib["optimiser"] < 2
    assert together.gib["server"] == pytest.approx(79.2 * 0.42)


def test_whole_weights_on_one_gpu_do_not_fit_and_too_many_gpus_are_refused():
    whole = params("1x80", "train.lora=null")
    assert not make_plan(whole, LAYOUTS["1x80"]).fits
    assert "DOES NOT FIT" in describe(make_plan(whole, LAYOUTS["1x80"]))
    with pytest.raises(ValueError, match="use 8 GPUs, but 4x80 has 4"):
        make_plan(params(), LAYOUTS["4x80"])


def test_published_hyper_parameters():
    chosen = params()
    assert (chosen.sft.steps, chosen.sft.optimiser.learning_rate, chosen.sft.micro_batch_tokens) == (
        500,
        2e-5,
        8192,
    )
    assert (chosen.sft.optimiser.schedule, chosen.sft.optimiser.warmup_share) == ("cosine", 0.05)
    assert (chosen.grpo.prompts_per_step, chosen.grpo.group_size, chosen.grpo.steps) == (7, 8, 54)
    assert (chosen.grpo.optimiser.learning_rate, chosen.grpo.optimiser.schedule) == (2e-6, "constant")
    assert (chosen.grpo.clip_low, chosen.grpo.clip_high, chosen.grpo.importance_cap) == (0.2, 0.2, 5.0)
    assert (chosen.grpo.micro_batch_tokens, chosen.grpo.kl_weight, chosen.grpo.save_every) == (
        16_384,
        0.01,
        5,
    )
    for optimiser in (chosen.sft.optimiser, chosen.grpo.optimiser):
        assert (optimiser.weight_decay, optimiser.betas, optimiser.clip_norm) == (0.01, (0.9, 0.999), 1.0)
    assert (chosen.episode.temperature, chosen.episode.max_new_tokens, chosen.episode.max_turns) == (
        0.7,
        2048,
        3,
    )
    assert (chosen.visual.min_pixels, chosen.visual.max_pixels) == (784, 50_176)
    assert chosen.budget.choices == [4, 8, 16, 32, 64]
    assert chosen.sft.freeze_vision and chosen.grpo.freeze_vision and chosen.sft.packing
    assert (chosen.train.sharding, chosen.train.dtype, chosen.train.gradient_checkpointing) == (
        "fsdp2",
        "bfloat16",
        True,
    )


def test_the_plan_says_what_it_assumes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["doctor", "--scale", "paravt_8b", "--layout", "8x80"]) == 0
    text = capsys.readouterr().out
    for word in (
        "weights",
        "gradients",
        "optimiser",
        "activations",
        "KV cache",
        "visual tokens",
        "steps an hour",
    ):
        assert word in text
    assert "estimates, not measured" in text and "utilisation 0.35" in text
    plan = to_json(make_plan(params(), LAYOUTS["8x80"]))
    assert json.loads(json.dumps(plan))["fits"] is True


def test_a_layout_of_another_scale_is_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["doctor", "--scale", "huge", "--layout", "8x80"]) == 2
    assert "scale=huge layout=8x80 cannot be composed" in capsys.readouterr().err
