"""Rollouts that are made ahead: order, bound, which weights, errors, ends; and the overlap in time."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.grpo.ahead import Ahead, Closed


class Sampler:
    """Records what it was asked, in order; a step's rollouts are its number and the weights it met."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.heard: list[tuple[str, int]] = []
        self.version: int | None = None

    def load(self, version: int) -> None:
        self.heard.append(("load", version))
        self.version = version

    def roll_out(self, step: int) -> tuple[int, int]:
        self.heard.append(("roll", step))
        before = self.version
        time.sleep(self.seconds)
        assert self.version == before  # weights never change inside a step
        return step, before


def trained(ahead: Ahead, steps: range, seconds: float = 0.0) -> list:
    """A trainer: takes each step, works, offers the next version."""
    taken = []
    ahead.offer(steps.start)
    for step in steps:
        made = ahead.take(step)
        taken.append(made)
        time.sleep(seconds)
        ahead.offer(step + 1)
    return taken


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(1, 4),
    first=st.integers(0, 5),
    count=st.integers(1, 7),
    slow=st.sampled_from(["sampler", "trainer", "neither"]),
)
def test_every_step_comes_once_in_order_within_the_bound(staleness, first, count, slow):
    steps = range(first, first + count)
    sampler = Sampler(0.004 if slow == "sampler" else 0.0)
    with Ahead(sampler.roll_out, sampler.load, steps, staleness) as ahead:
        taken = trained(ahead, steps, 0.004 if slow == "trainer" else 0.0)
    for step, made in zip(steps, taken, strict=True):
        assert made.value == (step, made.version)
        assert max(first, step - staleness) <= made.version <= step
    rolled = [step for what, step in sampler.heard if what == "roll"]
    loads = [version for what, version in sampler.heard if what == "load"]
    assert rolled == list(steps) and loads == sorted(set(loads)) and loads[0] == first


def test_a_step_waits_for_weights_that_are_recent_enough():
    sampler = Sampler()
    with Ahead(sampler.roll_out, sampler.load, range(5), 2) as ahead:
        ahead.offer(0)
        assert ahead.take(0).version == 0
        time.sleep(0.05)
        assert sampler.heard == [("load", 0), ("roll", 0), ("roll", 1), ("roll", 2)]
        ahead.offer(1)
        time.sleep(0.05)
        assert sampler.heard[4:] == [("load", 1), ("roll", 3)]
        assert ahead.loaded == 1


def test_the_slower_side_alone_is_waited_for():
    """Five steps of 40 ms and 60 ms: 0.36 s where one side waits for the other, 0.5 s where both do."""
    for sampling_s, training_s in ((0.04, 0.06), (0.06, 0.04)):
        sampler = Sampler(sampling_s)
        started = time.monotonic()
        with Ahead(sampler.roll_out, sampler.load, range(5), 1) as ahead:
            trained(ahead, range(5), training_s)
        seconds = time.monotonic() - started
        assert 0.33 < seconds < 0.46


def test_what_fails_is_raised_where_it_is_taken():
    def roll_out(step: int) -> int:
        if step == 1:
            raise ValueError("step 1 cannot be rolled out")
        return step

    with Ahead(roll_out, lambda version: None, range(3), 1) as ahead:
        ahead.offer(0)
        assert ahead.take(0).value == 0
        ahead.offer(1)
        with pytest.raises(ValueError, match="step 1 cannot"):
            ahead.take(1)


def test_an_end_in_the_middle_leaves_no_thread_that_waits():
    before = threading.active_count()
    sampler = Sampler()
    with Ahead(sampler.roll_out, sampler.load, range(100), 1) as ahead:
        ahead.offer(0)
        ahead.take(0)
        waiting = ahead._made[99]
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.02)
    assert threading.active_count() == before
    assert waiting.cancelled()
    with pytest.raises(Closed):
        ahead._wait_for(0)
