"""How the library tells its caller what happens, without knowing who listens.

Trainers and runners take a `Reporter`; the stages hand one in that writes to experiment tracking. The
default keeps quiet but counts, so nothing is lost when nobody listens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
import logging
import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paravt.rollout import Rollout

log = logging.getLogger("paravt")


class Reporter(Protocol):
    def metrics(self, values: Mapping[str, float | None], step: int) -> None: ...

    def rollouts(self, rollouts: Sequence[Rollout], step: int) -> None: ...

    def progress(self, done: int, total: int, note: str = "") -> None: ...


class LogReporter:
    """Writes to the `paravt` logger. Non-finite metrics are left out and counted in `dropped`."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        kept = finite(values, self.dropped)
        log.info("step %d: %s", step, ", ".join(f"{key} {value:.4g}" for key, value in kept.items()))

    def rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        log.debug("step %d: %d rollouts", step, len(rollouts))

    def progress(self, done: int, total: int, note: str = "") -> None:
        log.debug("%d of %d %s", done, total, note)


def finite(values: Mapping[str, float | None], dropped: Counter[str]) -> dict[str, float]:
    """The finite values of `values`; each other one adds 1 to `dropped[name]` and is logged."""
    kept = {}
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            kept[name] = float(value)
        else:
            dropped[name] += 1
            log.warning("metric %s is %s; not sent", name, value)
    return kept
