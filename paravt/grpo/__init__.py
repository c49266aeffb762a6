"""PARA-GRPO: frame budgets, advantages, anchors, the loss, the trainer.

The names of the trainer are loaded on first use, so that the arithmetic can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paravt.grpo.advantages import group_advantages
from paravt.grpo.budget import frame_budget

if TYPE_CHECKING:
    from paravt.grpo.loss import Denominators, LossInputs, LossOutput, policy_loss
    from paravt.grpo.setup import GRPOSetup
    from paravt.grpo.trainer import train

__all__ = [
    "Denominators",
    "GRPOSetup",
    "LossInputs",
    "LossOutput",
    "frame_budget",
    "group_advantages",
    "policy_loss",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paravt.grpo import loss, trainer

    return getattr(trainer if hasattr(trainer, name) else loss, name)
