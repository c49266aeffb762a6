"""Group advantages, worked by hand; equal, missing and lonely rewards."""

import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from paravt.grpo import group_advantages

SPREADS = ["sample", "population", "leave_one_out", "none"]
FLOATS = st.floats(-10, 10)


def test_sample_spread_to_the_digit():
    # mean 1/4, squares 9/16 + 3/16 = 3/4, divided by 3: variance 1/4, spread 1/2.
    assert group_advantages([1, 0, 0, 0]) == [1.5, -0.5, -0.5, -0.5]


def test_population_spread_by_hand():
    # mean 1/4, variance 3/16, spread sqrt(3)/4.
    wanted = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    assert group_advantages([1, 0, 0, 0], "population") == pytest.approx(wanted, abs=1e-15)


def test_leave_one_out_by_hand():
    # The 1 is compared with the mean 0 of the others; each 0 with the mean 1/3 of the others.
    assert group_advantages([1, 0, 0, 0], "leave_one_out") == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3], abs=1e-15
    )


def test_mean_only_by_hand():
    assert group_advantages([1, 0, 0, 0], "none") == [0.75, -0.25, -0.25, -0.25]


def test_no_epsilon_shrinks_a_small_spread():
    root = math.sqrt(0.5)
    assert group_advantages([0.001, 0.0]) == pytest.approx([root, -root], abs=1e-12)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_a_missing_reward_is_left_out_and_gets_zero(spread, missing):
    got = group_advantages([1, missing, 0, missing], spread)
    assert got[1] == got[3] == 0.0
    assert [got[0], got[2]] == group_advantages([1, 0], spread)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rewards", [[], [0.3], [None], [None, 0.3, math.nan]])
def test_fewer_than_two_usable_rewards_give_zero(spread, rewards):
    assert group_advantages(rewards, spread) == [0.0] * len(rewards)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, 1e6, -2.3])
@pytest.mark.parametrize("count", [2, 7, 8, 64])
def test_equal_rewards_give_exactly_zero(spread, value, count):
    assert group_advantages([value] * count, spread) == [0.0] * count


@pytest.mark.parametrize("spread", SPREADS)
def test_rewards_equal_up_to_rounding_give_exactly_zero(spread):
    thirds = [0.1 + 0.2, 0.3, 0.3 + 1e-9]
    assert len(set(thirds)) == 3
    assert group_advantages(thirds, spread) == [0.0] * 3


@given(st.lists(FLOATS, min_size=2, max_size=8), st.randoms(), st.sampled_from(SPREADS))
def test_the_order_of_the_group_does_not_matter_to_the_bit(rewards, random, spread):
    order = list(range(len(rewards)))
    random.shuffle(order)
    advantages = group_advantages(rewards, spread)
    assert group_advantages([rewards[i] for i in order], spread) == [advantages[i] for i in order]


@given(st.lists(FLOATS, min_size=2, max_size=8), st.sampled_from(SPREADS))
def test_advantages_are_centred_and_keep_the_order_of_rewards(rewards, spread):
    advantages = group_advantages(rewards, spread)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-7)
    pairs = sorted(zip(rewards, advantages, strict=True))
    assert all(a[1] <= b[1] for a, b in zip(pairs, pairs[1:], strict=False))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.integers(1, 9), st.integers(-9, 9))
def test_scale_and_shift_of_rewards_cancel_when_divided_by_their_spread(rewards, scale, shift):
    moved = [reward * scale + shift for reward in rewards]
    for spread in ("sample", "population"):
        assert group_advantages(moved, spread) == pytest.approx(group_advantages(rewards, spread), abs=1e-9)
