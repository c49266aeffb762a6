"""What each token of a group is credited with, part by part, for a person to look at.

    advantage of a token = what its episode's total is worth in the group  +  the anchor of its site

Nothing is computed here that training does not compute: the rows are those of `batch.step_rows`, once as they
are trained on and once without anchors; the difference is the anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paravt.chat import ChatEncoder
from paravt.config import AnchoringConfig, GRPOConfig
from paravt.conversation import Conversation
from paravt.grpo.batch import Group, Row, step_rows


@dataclass(frozen=True)
class Credit:
    """One conversation of T tokens as it is trained on: float64 [T] group advantage and anchor, bool [T]
    structural tokens. `trained` is False for one that is left out of the loss.
    """

    group: np.ndarray
    anchor: np.ndarray
    structural: np.ndarray
    trained: bool = True

    @property
    def total(self) -> np.ndarray:
        return self.group + self.anchor

    @classmethod
    def none(cls, conversation: Conversation) -> Credit:
        count = len(conversation.ids)
        return cls(np.zeros(count), np.zeros(count), np.zeros(count, dtype=bool), trained=False)


def group_credit(
    encoder: ChatEncoder, group: Group, config: GRPOConfig, anchoring: AnchoringConfig
) -> list[list[Credit]]:
    """For each episode of a rewarded group the credit of its main conversation, then of its sub-agents."""
    plain = step_rows(encoder, [group], config, anchoring.model_copy(update={"scope": "off"})).rows
    anchored = step_rows(encoder, [group], config, anchoring).rows
    return [
        [_credit(conversation, plain, anchored) for conversation in (rollout.main, *rollout.subagents)]
        for rollout in group.rollouts
    ]


def _credit(conversation: Conversation, plain: Sequence[Row], anchored: Sequence[Row]) -> Credit:
    for without, row in zip(plain, anchored, strict=True):
        if row.conversation is conversation:
            anchor = row.advantages - without.advantages
            return Credit(without.advantages, anchor, row.structural)
    return Credit.none(conversation)
