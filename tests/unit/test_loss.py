"""The objective: hand-worked values, masks, corrections, and one reduction whatever the micro-batches."""

from dataclasses import replace
import math

import pytest
import torch

from paravt.config import GRPOConfig, OptimiserConfig
from paravt.grpo.loss import (
    Denominators,
    LossInputs,
    k3,
    kl_to_go,
    mean_metrics,
    policy_loss,
    truncated_importance,
)

BASE = GRPOConfig(steps=1, prompts_per_step=1, optimiser=OptimiserConfig(learning_rate=1e-3), kl="none")
NORMALISERS = ["token", "sequence", "constant"]


def config(**changes) -> GRPOConfig:
    return GRPOConfig.model_validate(BASE.model_dump() | changes)


def tensor(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def inputs(policy, advantages, mask=None, **changes) -> LossInputs:
    policy = policy if torch.is_tensor(policy) else tensor(policy)
    mask = torch.ones_like(policy) if mask is None else tensor(mask)
    filled = {
        "policy_logprobs": policy,
        "proximal_logprobs": policy.detach(),
        "engine_logprobs": policy.detach(),
        "advantages": tensor(advantages),
        "loss_mask": mask,
        "entropy": torch.zeros_like(policy),
        "structural": torch.zeros_like(mask, dtype=torch.bool),
        "denominators": Denominators(int(mask.sum()), len(policy), longest=10),
    }
    return LossInputs(**filled | changes)


def metric(output, name: str) -> float:
    return mean_metrics([output])[name]


def test_token_and_sequence_means_by_hand():
    # Advantage +1 on 2 tokens, -1 on 8: the token mean is (2 - 8) / 10, the sequence mean (1 - 1) / 2.
    policy = torch.full((2, 8), -1.0, dtype=torch.float64)
    mask = [[1] * 2 + [0] * 6, [1] * 8]
    given = inputs(policy, [[1.0] * 8, [-1.0] * 8], mask)
    assert policy_loss(given, config(normaliser="token")).loss == pytest.approx(0.6)
    assert policy_loss(given, config(normaliser="sequence")).loss == pytest.approx(0.0)
    assert policy_loss(given, config(normaliser="constant")).loss == pytest.approx(6 / 20)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped"),
    [
        (1.5, 1.0, 1.2, 1),  # past the high bound: no more gain
        (1.5, -1.0, -1.5, 0),  # the pessimistic side is never clipped
        (0.5, 1.0, 0.5, 0),
        (0.5, -1.0, -0.7, 1),  # the low bound is 0.3 here
        (1.1, 2.0, 2.2, 0),
    ],
)
def test_the_clip_has_two_bounds(ratio, advantage, gain, clipped):
    proximal = tensor([[-1.0]])
    given = inputs(
        proximal + math.log(ratio), [[advantage]], proximal_logprobs=proximal, engine_logprobs=proximal
    )
    output = policy_loss(given, config(clip_low=0.3, clip_high=0.2))
    assert output.loss.item() == pytest.approx(-gain)
    assert metric(output, "clip_share") == clipped


def test_a_clipped_token_has_no_gradient():
    proximal = tensor([[-1.0, -1.0]])
    policy = (proximal + tensor([[math.log(1.5), math.log(1.1)]])).requires_grad_()
    given = inputs(policy, [[1.0, 1.0]], proximal_logprobs=proximal, engine_logprobs=proximal)
    policy_loss(given, BASE).loss.backward()
    assert policy.grad.tolist() == [[0.0, pytest.approx(-1.1 / 2)]]


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    policy = tensor([[-1.0, -2.0]]).requires_grad_()
    policy_loss(inputs(policy, [[3.0, -1.0]]), BASE).loss.backward()
    assert policy.grad.tolist() == [[-1.5, 0.5]]


@pytest.mark.parametrize(
    ("action", "weights"),
    [("mask", [0.5, 2.0, 0.0]), ("clamp", [0.5, 2.0, 5.0])],
)
def test_token_importance_is_truncated(action, weights):
    engine = tensor([[-1.0, -1.0, -1.0]])
    proximal = engine + tensor([[0.5, 2.0, 6.0]]).log()
    given = inputs(proximal, [[1.0, 1.0, 1.0]], engine_logprobs=engine)
    output = policy_loss(given, config(importance_action=action))
    assert output.loss.item() == pytest.approx(-sum(weights) / 3)  # masked tokens stay in the denominator
    assert metric(output, "ratio_before") == pytest.approx((0.5 + 2 + 6) / 3)
    assert metric(output, "ratio_after") == pytest.approx(sum(weights) / 3)
    assert metric(output, "masked_share") == pytest.approx(1 / 3)
    gaps = [math.log(0.5), math.log(2), math.log(6)]
    assert metric(output, "mismatch_kl") == pytest.approx(sum(math.exp(g) - 1 - g for g in gaps) / 3)


def test_geometric_importance_is_one_weight_a_sequence_over_its_own_tokens():
    log_gap = tensor([[0.1, 0.3, 9.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    weight, above = truncated_importance(log_gap, mask, config(importance="geometric"))
    assert weight[0, :2].tolist() == pytest.approx([math.exp(0.2)] * 2)
    assert above.tolist() == [[False, False, False], [True, True, True]]
    assert weight[1].tolist() == [0.0, 0.0, 0.0]


def test_a_geometric_weight_is_clamped_at_the_cap_for_the_whole_sequence():
    log_gap = tensor([[0.0, 2 * math.log(6)], [0.0, 0.0]])  # geometric means 6 and 1
    mask = torch.ones_like(log_gap, dtype=torch.bool)
    chosen = config(importance="geometric", importance_action="clamp", importance_cap=5.0)
    weight, above = truncated_importance(log_gap, mask, chosen)
    assert weight.tolist() == [pytest.approx([5.0, 5.0]), [1.0, 1.0]]
    assert above.tolist() == [[True, True], [False, False]]


def test_k3_by_hand():
    # x = log f - log p: f/p - 1 - log(f/p) at f/p = 2, 1 and 1/2.
    found = k3(tensor([2.0, 1.0, 0.5]).log())
    assert found.tolist() == pytest.approx([1 - math.log(2), 0.0, math.log(2) - 0.5], abs=1e-15)


def test_all_terms_and_normalisers_by_hand():
    # Rows of 2 and 1 tokens; ratio 1, engine half as sure (w = 2), k3 = 1 - log 2, entropy 0.5 everywhere.
    mask = [[1, 1], [1, 0]]
    policy = torch.full((2, 2), -1.0, dtype=torch.float64)
    given = inputs(
        policy,
        [[1.0, 3.0], [-2.0, 9.0]],
        mask,
        engine_logprobs=policy - math.log(2),
        ref_logprobs=policy + math.log(2),
        entropy=torch.full_like(policy, 0.5),
        denominators=Denominators(3, 2, longest=10),
    )
    apart = 1 - math.log(2)
    wanted = {
        "token": (-2 * (1 + 3 - 2) + 0.1 * 3 * apart - 0.01 * 3 * 0.5) / 3,
        "sequence": (-2 * ((1 + 3) / 2 - 2) + 0.1 * 2 * apart - 0.01 * 2 * 0.5) / 2,
        "constant": (-2 * (1 + 3 - 2) + 0.1 * 3 * apart - 0.01 * 3 * 0.5) / 20,
    }
    for normaliser, loss in wanted.items():
        chosen = config(kl="loss", kl_weight=0.1, entropy_weight=0.01, normaliser=normaliser)
        assert policy_loss(given, chosen).loss.item() == pytest.approx(loss, abs=1e-12)


def test_the_correction_does_not_drift_with_length():
    torch.manual_seed(0)
    log_gap = 0.02 * torch.randn(64, 4096, dtype=torch.float64)
    mask = torch.ones_like(log_gap, dtype=torch.bool)
    for kind in ("token", "geometric"):
        weight, above = truncated_importance(log_gap, mask, config(importance=kind, importance_cap=3.0))
        assert weight.mean().item() == pytest.approx(1.0, abs=0.003)
        assert not above.any()


def test_importance_off_leaves_the_loss_alone():
    engine = tensor([[-3.0]])
    output = policy_loss(inputs([[-1.0]], [[1.0]], engine_logprobs=engine), config(importance="off"))
    assert output.loss.item() == pytest.approx(-1.0)
    assert metric(output, "ratio_before") == pytest.approx(math.exp(2))


def test_kl_in_the_loss_is_k3_with_the_right_gradient():
    policy = tensor([[-1.0, -2.0]]).requires_grad_()
    given = inputs(policy, [[0.0, 0.0]], ref_logprobs=tensor([[-1.5, -2.0]]))
    output = policy_loss(given, config(kl="loss", kl_weight=0.1))
    k3 = math.exp(-0.5) - 1 + 0.5
    assert output.loss.item() == pytest.approx(0.1 * k3 / 2)
    assert metric(output, "ref_kl") == pytest.approx(k3 / 2)
    output.loss.backward()
    assert policy.grad.tolist() == [[pytest.approx(0.1 * (1 - math.exp(-0.5)) / 2), 0.0]]


def test_kl_in_the_loss_needs_the_frozen_start():
    with pytest.raises(ValueError, match="frozen start"):
        policy_loss(inputs([[-1.0]], [[1.0]]), config(kl="loss"))


def test_kl_in_the_reward_is_paid_by_the_tokens_before_it():
    engine, ref = tensor([[-1.0, -1.0, -1.0, -1.0]]), tensor([[-9.0, -1.5, -1.0, -31.0]])
    got = kl_to_go(engine, ref, tensor([[0, 1, 1, 1]]), 0.1)
    # k1 is 0.5, 0 and 30, the last held at 10.
    assert got.tolist() == [[0.0, pytest.approx(-1.05), pytest.approx(-1.0), pytest.approx(-1.0)]]


def test_entropy_is_watched_on_tags_and_others_apart_and_pushed_only_if_weighted():
    given = inputs(
        [[-1.0, -1.0, -1.0]],
        [[0.0] * 3],
        [[1, 1, 0]],
        entropy=tensor([[0.5, 2.0, 7.0]]),
        structural=torch.tensor([[True, False, True]]),
    )
    output = policy_loss(given, BASE)
    assert output.loss == 0
    assert metric(output, "entropy") == 1.25
    assert (metric(output, "entropy_structural"), metric(output, "entropy_other")) == (0.5, 2.0)
    assert policy_loss(given, config(entropy_weight=0.1)).loss.item() == pytest.approx(-0.125)


def test_no_advantage_gives_a_policy_term_and_gradient_of_exactly_zero():
    torch.manual_seed(1)
    policy = (-3 * torch.rand(4, 9, dtype=torch.float64)).requires_grad_()
    engine = policy.detach() + 0.5 * torch.randn(4, 9, dtype=torch.float64)
    proximal = policy.detach() + 0.3 * torch.randn(4, 9, dtype=torch.float64)
    zeros = torch.zeros(4, 9, dtype=torch.float64)
    output = policy_loss(inputs(policy, zeros, proximal_logprobs=proximal, engine_logprobs=engine), BASE)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not policy.grad.any()


def test_what_is_off_the_mask_cannot_be_seen():
    wild = tensor([[-1.0, math.nan, -math.inf]])
    masked = [[1, 0, 0]]
    clean = inputs([[-1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]], masked)
    dirty = replace(clean, engine_logprobs=wild, entropy=wild, proximal_logprobs=wild, ref_logprobs=wild)
    chosen = config(kl="loss", entropy_weight=0.1)
    clean = replace(clean, ref_logprobs=tensor([[-1.0, 0.0, 0.0]]), entropy=tensor([[-1.0, 0.0, 0.0]]))
    assert policy_loss(dirty, chosen).loss == policy_loss(clean, chosen).loss
    assert mean_metrics([policy_loss(dirty, chosen)]) == mean_metrics([policy_loss(clean, chosen)])


def test_an_all_masked_micro_batch_adds_nothing():
    policy = tensor([[-1.0, -2.0]]).requires_grad_()
    given = inputs(policy, [[1.0, 1.0]], [[0, 0]], denominators=Denominators(10, 2))
    for normaliser in NORMALISERS:
        output = policy_loss(given, config(normaliser=normaliser))
        output.loss.backward()
        assert output.loss.item() == 0.0
    assert not policy.grad.any()
    assert "entropy" not in mean_metrics([output])


def episodes(count: int = 8):
    """Rows of unlike lengths from a small softmax policy of 11 tokens; float64 throughout."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = [3, 9, 5, 1, 12, 7, 7, 2][:count]
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    return {
        "states": noise(count, width, 6),
        "tokens": torch.randint(0, 11, (count, width), generator=generator),
        "mask": mask,
        "advantages": noise(count, 1) * mask,
        "gap": 0.6 * noise(count, width),
        "ref_gap": 0.3 * noise(count, width),
    }


def step_loss(weights, data, chosen, size):
    """Loss and gradient of a step cut into micro-batches of `size` rows, each trimmed to its longest."""
    weights = weights.clone().requires_grad_()
    tokens, rows = int(data["mask"].sum()), len(data["mask"])
    total, outputs = 0.0, []
    for first in range(0, rows, size):
        part = {name: value[first : first + size] for name, value in data.items()}
        width = int(part["mask"].sum(1).max())
        part = {name: value[:, :width] for name, value in part.items()}
        logprobs = (part["states"] @ weights).log_softmax(-1)
        policy = logprobs.gather(-1, part["tokens"].unsqueeze(-1)).squeeze(-1)
        output = policy_loss(
            LossInputs(
                policy_logprobs=policy,
                proximal_logprobs=policy.detach(),
                engine_logprobs=policy.detach() - part["gap"],
                ref_logprobs=policy.detach() + part["ref_gap"],
                advantages=part["advantages"],
                loss_mask=part["mask"],
                entropy=-(logprobs.exp() * logprobs).sum(-1),
                structural=part["tokens"] < 3,
                denominators=Denominators(tokens, rows, longest=20),
            ),
            chosen,
        )
        output.loss.backward()
        total += output.loss.item()
        outputs.append(output)
    return total, weights.grad, mean_metrics(outputs)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("importance", ["token", "geometric"])
def test_loss_and_gradient_do_not_depend_on_the_micro_batch_size(normaliser, importance):
    chosen = config(
        normaliser=normaliser,
        importance=importance,
        importance_cap=1.5,
        kl="loss",
        kl_weight=0.05,
        entropy_weight=0.01,
    )
    weights = torch.randn(6, 11, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss, gradient, metrics = step_loss(weights, episodes(), chosen, 8)
    assert gradient.abs().max() > 1e-3
    for size in (1, 2):
        other_loss, other_gradient, other_metrics = step_loss(weights, episodes(), chosen, size)
        assert other_loss == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(other_gradient, gradient, rtol=0, atol=1e-12)
        assert other_metrics == pytest.approx(metrics, abs=1e-12)


def test_the_gradient_is_that_of_the_formula():
    chosen = config(kl="loss", kl_weight=0.05, entropy_weight=0.02)
    data = episodes(3)
    weights = torch.randn(6, 11, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    proximal = (data["states"] @ weights).log_softmax(-1)
    proximal = proximal.gather(-1, data["tokens"].unsqueeze(-1)).squeeze(-1)

    def loss_of(values):
        logprobs = (data["states"] @ values).log_softmax(-1)
        given = LossInputs(
            policy_logprobs=logprobs.gather(-1, data["tokens"].unsqueeze(-1)).squeeze(-1),
            proximal_logprobs=proximal,
            engine_logprobs=proximal - 0.1,
            ref_logprobs=proximal + data["ref_gap"],
            advantages=data["advantages"],
            loss_mask=data["mask"],
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            structural=data["tokens"] < 3,
            denominators=Denominators(int(data["mask"].sum()), 3),
        )
        return policy_loss(given, chosen).loss

    moved = weights + 0.01  # off the kink of min(), where both branches meet
    assert torch.autograd.gradcheck(loss_of, (moved.requires_grad_(),), atol=1e-6)
