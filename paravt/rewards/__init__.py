"""What an episode is worth: accuracy, format and tool use, each a pure function of its record."""

from paravt.rewards.format import Site
from paravt.rewards.score import Reward, score

__all__ = ["Reward", "Site", "score"]
