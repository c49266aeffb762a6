"""The objective, as a pure function of tensors.

Per sampled token, with A its advantage, p the policy that is trained, p0 the policy at the start of the step,
q the engine that sampled, f the frozen start:

    loss = - w min(r A, clip(r, 1 - low, 1 + high) A)  +  kl_weight k3  -  entropy_weight H
    r    = p / p0                     the PPO ratio; 1 in the first update of a batch
    w    = p0 / q, truncated          engine against trainer; no gradient
    k3   = f/p - 1 - log(f/p)         unbiased and never negative estimate of KL(p, f)

Truncation at `importance_cap`: "mask" sets w above it to 0, as the release does, "clamp" sets it to the cap.
"geometric" takes one w per sequence, the geometric mean of its tokens': a product over thousands of tokens
would say how long a text is, not how far the two policies are apart. KL and entropy are not weighted by w.

Reduction, with denominators of the whole step, over all micro-batches and processes:

    token      sum over tokens / number of loss tokens
    sequence   sum over sequences of the mean over their tokens / number of sequences
    constant   sum over tokens / (number of sequences x longest allowed turn)

Losses of micro-batches add up to the loss of the step, so neither loss nor gradient depends on how the step
was cut. Masked tokens stay in the denominators: leaving them out would inflate the others.

An advantage of 0 makes the first term and its gradient exactly 0. Log-ratios are held within +-20.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paravt.config import GRPOConfig

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole step: `tokens` and `sequences` of the loss; `longest` allowed turn in tokens."""

    tokens: int
    sequences: int
    longest: int = 1


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch; all tensors [B, T], aligned with the ids. Only `policy_logprobs` (and `entropy`, if it
    has a weight) carry a gradient. `structural` marks tag tokens, for the metrics. `ref_logprobs` may be None
    where the config has no KL in the loss.
    """

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    entropy: Tensor
    structural: Tensor
    denominators: Denominators
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this micro-batch's part of the step's loss; so is each of `terms` (policy, kl, entropy).

    `sums` holds, for each metric, its sum over tokens and the number of tokens: `mean_metrics` joins those of
    several micro-batches.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    sums: dict[str, tuple[Tensor, Tensor]]

    def detached(self) -> LossOutput:
        """The same numbers on the CPU, without what a gradient would need."""
        sums = {name: (value.cpu(), count.cpu()) for name, (value, count) in self.sums.items()}
        terms = {name: term.cpu() for name, term in self.terms.items()}
        return LossOutput(self.loss.detach().cpu(), terms, sums)


def policy_loss(inputs: LossInputs, config: GRPOConfig) -> LossOutput:
    """Loss and metrics of one micro-batch. Raises ValueError if a KL is asked for without `ref_logprobs`."""
    mask = inputs.loss_mask.bool()
    policy = inputs.policy_logprobs
    log_ratio = _masked(policy - inputs.proximal_logprobs, mask)
    ratio = log_ratio.exp()
    log_gap = _masked(inputs.proximal_logprobs.detach() - inputs.engine_logprobs, mask)
    weight, truncated = truncated_importance(log_gap, mask, config)

    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    policy_terms = torch.where(mask, -weight * gain, 0.0)

    if inputs.ref_logprobs is None:
        if config.kl == "loss":
            raise ValueError("grpo.kl is loss, but the log-probs of the frozen start were not given")
        ref_kl = torch.zeros_like(policy)
    else:
        ref_kl = k3(_masked(inputs.ref_logprobs - policy, mask))
    kl_weight = config.kl_weight if config.kl == "loss" else 0.0
    entropy = torch.where(mask, inputs.entropy, 0.0)

    terms = {
        "policy": reduce(policy_terms, mask, config, inputs.denominators),
        "kl": reduce(kl_weight * ref_kl, mask, config, inputs.denominators),
        "entropy": reduce(-config.entropy_weight * entropy, mask, config, inputs.denominators),
    }
    used = [terms["policy"]]
    used += [terms["kl"]] if kl_weight else []
    used += [terms["entropy"]] if config.entropy_weight else []
    structural = mask & inputs.structural.bool()
    off_clip = torch.where(inputs.advantages > 0, ratio > 1 + config.clip_high, ratio < 1 - config.clip_low)
    sums = {
        "ratio_before": _sum(log_gap.exp(), mask),
        "ratio_after": _sum(weight, mask),
        "masked_share": _sum(truncated, mask),
        "mismatch_kl": _sum(k3(log_gap), mask),
        "clip_share": _sum(off_clip & (inputs.advantages != 0), mask),
        "entropy": _sum(entropy, mask),
        "entropy_structural": _sum(entropy, structural),
        "entropy_other": _sum(entropy, mask & ~structural),
    }
    if inputs.ref_logprobs is not None:
        sums["ref_kl"] = _sum(ref_kl, mask)
    return LossOutput(sum(used), {name: term.detach() for name, term in terms.items()}, sums)


def truncated_importance(log_gap: Tensor, mask: Tensor, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Weights w and the mask of truncated tokens, both [B, T], from log(p0 / q); no gradient.

    All ones and no truncation where the correction is off, so that the caller has no branch.
    """
    if config.importance == "off":
        return torch.ones_like(log_gap), torch.zeros_like(mask)
    if config.importance == "geometric":
        mean = (log_gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
        log_gap = mean.expand_as(log_gap)
    weight = log_gap.detach().exp()
    above = (weight > config.importance_cap) & mask
    limit = 0.0 if config.importance_action == "mask" else config.importance_cap
    return torch.where(above, limit, weight), above


def reduce(values: Tensor, mask: Tensor, config: GRPOConfig, denominators: Denominators) -> Tensor:
    """The one place where per-token values [B, T] become a number; see the module's table."""
    values = torch.where(mask, values, 0.0)
    if config.normaliser == "token":
        return values.sum() / denominators.tokens
    if config.normaliser == "sequence":
        return (values.sum(1) / mask.sum(1).clamp_min(1)).sum() / denominators.sequences
    return values.sum() / (denominators.sequences * denominators.longest)


def kl_to_go(engine_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, weight: float) -> Tensor:
    """What `kl: reward` adds to the advantages [B, T]: minus weight x the k1 terms from this token on.

    k1 = log q - log f of the sampled token, held within +-10; tokens that were not sampled count nothing.
    """
    k1 = (engine_logprobs - ref_logprobs).clamp(-10, 10) * loss_mask
    return -weight * k1.flip(1).cumsum(1).flip(1) * loss_mask


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x: what KL(p, f) is on average over tokens of p, with x = log f - log p."""
    return log_ratio.exp() - 1 - log_ratio


def mean_metrics(outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Loss terms summed, other metrics averaged over the tokens of the step; absent if there is no token."""
    terms: dict[str, float] = {}
    totals: dict[str, list[float]] = {}
    for output in outputs:
        for name, term in output.terms.items():
            terms[f"loss/{name}"] = terms.get(f"loss/{name}", 0.0) + term.item()
        for name, (value, count) in output.sums.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += value.item()
            total[1] += count.item()
    return terms | {name: value / count for name, (value, count) in totals.items() if count}


def _masked(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """A log-ratio that is 0 off the mask and within bounds on it, so that its exponential is finite."""
    return torch.where(mask, log_ratio, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    values = values.detach().double()
    return torch.where(mask, values, 0.0).sum(), mask.sum()
