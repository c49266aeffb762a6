"""The order of samples: each once an epoch, the same after a resume, another one in each epoch."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from paravt.hashing import epoch_order, items_of_step

IDS = [f"s{i}" for i in range(20)]


@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 7))
def test_steps_cut_one_endless_row_of_epochs(seed, count, per_step):
    ids = IDS[:count]
    steps = 3 * count
    visited = [item for step in range(steps) for item in items_of_step(seed, step, per_step, ids)]
    for epoch in range(steps * per_step // max(len(ids), 1)):
        mine = [item.index for item in visited if item.epoch == epoch]
        assert tuple(mine) == epoch_order(seed, epoch, ids)
        assert sorted(mine) == list(range(len(ids)))


def test_the_next_epoch_has_another_order():
    orders = {epoch_order(1, epoch, IDS) for epoch in range(5)}
    assert len(orders) == 5


def test_the_order_follows_ids_not_positions():
    shuffled = IDS[7:] + IDS[:7]
    assert [IDS[i] for i in epoch_order(1, 0, IDS)] == [shuffled[i] for i in epoch_order(1, 0, shuffled)]


def test_a_run_resumed_anywhere_sees_what_the_unbroken_run_sees():
    # 20 samples, 2 a step, stopped after 4 steps, then on into the second epoch.
    unbroken = [items_of_step(1, step, 2, IDS) for step in range(20)]
    assert unbroken[:4] + [items_of_step(1, step, 2, IDS) for step in range(4, 20)] == unbroken
    assert sorted(item.index for step in unbroken[:10] for item in step) == list(range(20))
    assert sorted(item.index for step in unbroken[10:] for item in step) == list(range(20))


def test_a_step_at_an_epoch_border_takes_from_both():
    ids = IDS[:6]
    items = items_of_step(1, 1, 4, ids)
    assert [item.epoch for item in items] == [0, 0, 1, 1]
    assert [item.index for item in items] == [*epoch_order(1, 0, ids)[4:], *epoch_order(1, 1, ids)[:2]]


def test_no_samples_is_said():
    with pytest.raises(ValueError, match="no samples"):
        items_of_step(1, 0, 4, [])
