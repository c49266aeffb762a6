"""What the metrics of steps give away: engine and trainer apart, nothing rewarded, nothing trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
import logging

log = logging.getLogger("paravt")

RATIO_SLACK = 0.05  # of the mean importance ratio around 1
MOST_MISMATCH_KL = 0.02  # nats per token; other kernels and precisions alone make some thousandths

Line = Mapping[str, float]


def warn_of_mismatch(values: Line) -> None:
    """Say so if engine and trainer differ on the same weights, by the metrics of a step on fresh ones.

    Over many tokens the mean ratio p / q is 1 for any p that allows what q does: it shows other weights and
    another support. Another temperature shows in the KL alone.
    """
    ratio, kl = values.get("ratio_before", 1.0), values.get("mismatch_kl", 0.0)
    if abs(ratio - 1) > RATIO_SLACK or kl > MOST_MISMATCH_KL:
        log.warning(
            "trainer and engine differ before any update: mean ratio %.3f, KL %.4f nats a token; do both use "
            "the same weights, temperature and support?",
            ratio,
            kl,
        )


def empty_steps(lines: Sequence[Line]) -> int:
    """How many steps up to the last one had no episode with a reward."""
    return sum(1 for _ in takewhile(lambda line: "reward/total" not in line, reversed(lines)))


def why_untrained(lines: Sequence[Line]) -> str:
    """A sentence if no step of a run has changed a weight, so that its model is its start; else empty."""
    if not all(line["update_skipped"] for line in lines):
        return ""
    without_spread = sum(line["groups_without_spread"] for line in lines) / len(lines)
    formats = [line["reward/format"] for line in lines if "reward/format" in line]
    mean_format = f"{sum(formats) / len(formats):.2f}" if formats else "unknown"
    return (
        f"none of {len(lines)} steps changed a weight: in {without_spread:.0%} of the groups all totals are "
        f"equal, the mean format reward is {mean_format}; give samples that are neither always right nor "
        "always wrong, a larger grpo.group_size, or a start that writes the format"
    )
