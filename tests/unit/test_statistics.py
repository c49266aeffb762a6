"""Intervals and paired differences: values, limits, seeds, and what must be refused."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from paravt.benchmarks.statistics import Difference, bootstrap_interval, paired_difference


def test_interval_of_a_share_agrees_with_the_normal_limits():
    values = [1.0] * 60 + [0.0] * 40
    found = bootstrap_interval(values)
    spread = 1.96 * (0.6 * 0.4 / 100) ** 0.5
    assert found.mean == pytest.approx(0.6)
    assert found.n == 100
    assert found.low == pytest.approx(0.6 - spread, abs=0.015)
    assert found.high == pytest.approx(0.6 + spread, abs=0.015)


def test_equal_values_have_no_spread():
    found = bootstrap_interval([0.25] * 7)
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def test_nothing_to_average_is_no_number():
    assert bootstrap_interval([]).to_json() == {"mean": None, "low": None, "high": None, "n": 0}


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), None])
def test_a_missing_score_is_refused_not_averaged(missing):
    with pytest.raises(ValueError, match="missing or not finite"):
        bootstrap_interval([1.0, missing])
    with pytest.raises(ValueError, match="missing or not finite"):
        paired_difference([1.0, 0.0], [1.0, missing])


def test_same_scores_same_limits_in_every_process():
    values = [0.0, 1.0, 1.0, 0.5, 0.25] * 10
    first, again = bootstrap_interval(values, seed=3), bootstrap_interval(values, seed=3)
    assert first == again
    assert (first.low, first.high) == (0.44, 0.66)  # numpy's PCG64 is the same on every machine
    assert bootstrap_interval(values, seed=4) != first


def test_pairing_removes_what_makes_a_question_hard():
    rng = np.random.default_rng(0)
    hardness = rng.random(300)
    first, second = hardness, hardness + 0.01
    found = paired_difference(first, second)
    assert found.mean == pytest.approx(0.01)
    assert found.low == pytest.approx(0.01) and found.high == pytest.approx(0.01)
    assert found.clear
    alone = bootstrap_interval(second)
    assert alone.low < bootstrap_interval(first).high  # unpaired, the intervals overlap


def test_a_difference_within_noise_is_not_clear():
    rng = np.random.default_rng(1)
    first, second = rng.random(60), rng.random(60)
    found = paired_difference(first, second)
    assert found.low < 0 < found.high
    assert not found.clear


def test_seeds_are_redrawn_too():
    # Each seed shifts all its questions alike: more questions cannot make up for few seeds.
    first = np.zeros((3, 500))
    second = np.array([[0.05], [0.10], [0.30]]) + np.zeros((3, 500))
    found = paired_difference(first, second)
    assert found.by_seed == pytest.approx((0.05, 0.10, 0.30))
    assert found.mean == pytest.approx(0.15)
    assert found.low == pytest.approx(0.05) and found.high == pytest.approx(0.30)


def test_clear_needs_the_same_sign_in_each_seed():
    assert Difference(0.1, 0.02, 0.2, 100, (0.1, 0.1, 0.1)).clear
    assert not Difference(0.1, 0.02, 0.2, 100, (0.2, 0.15, -0.05)).clear
    assert not Difference(0.1, -0.01, 0.2, 100, (0.1, 0.1, 0.1)).clear
    assert Difference(-0.1, -0.2, -0.02, 100, (-0.1,)).clear


@pytest.mark.parametrize("first, second", [([1.0], [1.0, 0.0]), ([], []), ([[1.0], [1.0]], [1.0])])
def test_other_questions_or_seeds_are_refused(first, second):
    with pytest.raises(ValueError, match="the same seeds and questions"):
        paired_difference(first, second)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_limits_hold_the_mean_and_stay_inside_the_scores(values):
    found = bootstrap_interval(values, resamples=200)
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert found.mean == pytest.approx(float(np.mean(values)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_swapping_the_models_turns_the_sign(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    forth = paired_difference(first, second, resamples=200)
    back = paired_difference(second, first, resamples=200)
    assert forth.mean == pytest.approx(-back.mean, abs=1e-12)
    assert forth.low == pytest.approx(-back.high, abs=1e-12)
