"""Rollouts of the next steps, made in a thread while the trainer works.

With `grpo.staleness` n > 0 the rollouts of step s

    begin    once the weights after s - n steps exist, with the newest that there are by then
    are      of one version: the engine takes new weights between the rollouts of two steps, never inside
    wait     until the trainer comes to step s

so a step is never more than n versions old, a group is never of two policies, and at most n steps lie ready.
The wait for the slower side remains, that for the other is gone:

    seconds of a step -> max(rollout, reward + train + sync)       instead of their sum

What is drawn follows from (seed, step, sample id) as without staleness, but which weights a step meets
follows from how fast both sides are, so two runs need not be equal. After a resume the first rollouts have
the weights of the checkpoint. The loss corrects for the older sampler where it corrects for the engine (w =
p0 / q in `loss`): with one update a step the proximal policy is the present one, as in the decoupled
objective of AReaL (arXiv 2505.24298).

The engine must have weights of its own, and what it computes must not hold the interpreter: a server's does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition
import time
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

NONE_YET = -(10**9)  # older than what any step may be rolled out with


class Closed(RuntimeError):
    """Nobody waits for these rollouts any more."""


@dataclass(frozen=True)
class Made(Generic[T]):
    """What a step's rollouts are, the version of the weights, and the seconds it took to make them."""

    value: T
    version: int
    seconds: float


class Ahead(Generic[T]):
    """Makes the steps of `steps` in their order, each as soon as its weights are old enough to be allowed.

    `roll_out(step)` and `load(version)` run in a thread of this object, one call at a time. Leave the
    context to end it: what is under way is finished or, if its engine is closed, fails; nobody waits for it.
    """

    def __init__(
        self, roll_out: Callable[[int], T], load: Callable[[int], None], steps: range, staleness: int
    ) -> None:
        self.roll_out, self.load, self.staleness = roll_out, load, staleness
        self.loaded: int | None = None
        """The version that the engine has."""
        self._newest = NONE_YET
        self._closed = False
        self._changed = Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._made: dict[int, Future[Made[T]]] = {}
        for step in steps:
            self._made[step] = self._thread.submit(self._make, step)

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def offer(self, version: int) -> None:
        """Say that the weights after `version` steps can be loaded."""
        with self._changed:
            self._newest = version
            self._changed.notify_all()

    def take(self, step: int) -> Made[T]:
        """The rollouts of `step`, once they are made. Raises what making them raised."""
        return self._made.pop(step).result()

    def _make(self, step: int) -> Made[T]:
        version = self._wait_for(step - self.staleness)
        if version != self.loaded:
            self.load(version)
            self.loaded = version
        started = time.monotonic()
        value = self.roll_out(step)
        return Made(value, version, time.monotonic() - started)

    def _wait_for(self, oldest: int) -> int:
        """The newest version, once it is `oldest` or later."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest >= oldest)
            if self._closed:
                raise Closed("the trainer has ended")
            return self._newest
