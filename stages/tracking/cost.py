"""What a run has cost, from its own record: every attempt counts, what a kill threw away included.

    cost/wall_s           seconds from start to end, summed over the attempts
    cost/gpu_h            the same in hours, times the GPUs that the stage used
    cost/episodes         episodes that were played
    cost/tokens_sampled   tokens that the model wrote in them, sub-agents included
    cost/tokens_trained   tokens that a loss was taken over
    cost/frames           video frames that were decoded for episodes

A trainer reports its episodes step by step, in its metrics; others hand each rollout over (`spent`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
import os
import sys
from typing import Any

from paravt.rollout import Rollout

PREFIX = "cost/"
EVERY_STEP = "episodes"  # a metric of trainers that play episodes
PER_EPISODE = {"tokens_per_episode": "tokens_sampled", "frames_per_episode": "frames"}
TRAINED = ("loss_tokens", "tokens")  # as RL and SFT call them


def cost(events: Iterable[Mapping[str, Any]], gpus: int = 0) -> dict[str, float]:
    """The figures of all that a record holds, `cost/` in front; what never occurred is absent."""
    spent: Counter[str] = Counter()
    wall_s = began = last = 0.0
    for event in events:
        if event["kind"] == "start":
            wall_s += last - began
            began = event["time"]
        last = event.get("ended", event["time"])  # who finds a dead run writes its end later
        if event["kind"] == "spent":
            spent.update(event["values"])
        elif event["kind"] == "metrics":
            spent.update(_step(event["values"]))
    wall_s += last - began
    found = {"wall_s": wall_s} | {name: value for name, value in spent.items() if value}
    if gpus:
        found["gpu_h"] = wall_s / 3600 * gpus
    return {f"{PREFIX}{name}": float(value) for name, value in found.items()}


def of_rollouts(rollouts: Iterable[Rollout]) -> dict[str, int]:
    """What these episodes took."""
    spent: Counter[str] = Counter()
    for rollout in rollouts:
        spent["episodes"] += 1
        spent["tokens_sampled"] += rollout.tokens_written
        spent["frames"] += rollout.frames_read
    return dict(spent)


def gpus_used() -> int:
    """GPUs that this process may use, if it has used one at all."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(shown.split(",")) if shown else torch.cuda.device_count()


def _step(values: Mapping[str, float]) -> dict[str, float]:
    spent = {}
    if episodes := values.get(EVERY_STEP):
        spent["episodes"] = episodes
        for name, total in PER_EPISODE.items():
            spent[total] = episodes * values.get(name, 0.0)
    trained = next((values[name] for name in TRAINED if name in values), None)
    return spent if trained is None else spent | {"tokens_trained": trained}
