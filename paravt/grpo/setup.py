"""What a GRPO run depends on beside model and samples."""

from __future__ import annotations

from dataclasses import dataclass
import logging

from paravt.config import (
    AnchoringConfig,
    BudgetConfig,
    EpisodeConfig,
    GRPOConfig,
    Params,
    RewardConfig,
    TrainConfig,
    VisualConfig,
)

log = logging.getLogger("paravt")


@dataclass(frozen=True)
class GRPOSetup:
    """The parameters of one run. Raises ValueError for what cannot be trained."""

    seed: int
    visual: VisualConfig
    budget: BudgetConfig
    episode: EpisodeConfig
    reward: RewardConfig
    anchoring: AnchoringConfig
    grpo: GRPOConfig
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        if self.episode.temperature == 0:
            raise ValueError(
                "episode.temperature is 0, but a group of greedy episodes has no spread; use 0.7 or 1"
            )
        if self.grpo.group_size == 1:
            log.warning("grpo.group_size is 1: a group of one has no spread, only anchors could train")

    @classmethod
    def of(cls, params: Params) -> GRPOSetup:
        names = ("seed", "visual", "budget", "episode", "reward", "anchoring", "grpo", "train")
        return cls(**{name: getattr(params, name) for name in names})

    def identity(self) -> list:
        """All of it that the trained weights depend on, as JSON data."""
        configs = (self.visual, self.budget, self.episode, self.reward, self.anchoring)
        grpo = self.grpo.model_dump(exclude={"save_every", "keep_checkpoints"})
        return [self.seed, *(config.model_dump() for config in configs), grpo, self.train.identity()]
