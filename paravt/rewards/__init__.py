"""What an episode is worth: accuracy, format and tool use, each a pure function of its record."""

from paravt.protocol.sites import Site
from paravt.rewards.score import Reward, score

__all__ = ["Reward", "Site", "score"]
