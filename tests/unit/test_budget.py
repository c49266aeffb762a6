"""Frame budgets: stable draws, uniform over the choices."""

from collections import Counter
import subprocess
import sys

import pytest

from paravt.config import BudgetConfig
from paravt.grpo.budget import frame_budget, prompt_budget
from paravt.hashing import stable_hash

CHOICES = [4, 8, 16, 32, 64]


def test_a_draw_depends_on_seed_epoch_and_sample_alone():
    drawn = [frame_budget(1, 0, f"clip-{i}", CHOICES) for i in range(8)]
    assert drawn == [frame_budget(1, 0, f"clip-{i}", CHOICES) for i in range(8)]
    assert drawn != [frame_budget(1, 1, f"clip-{i}", CHOICES) for i in range(8)]
    assert drawn != [frame_budget(2, 0, f"clip-{i}", CHOICES) for i in range(8)]


@pytest.mark.parametrize("salt", ["0", "4711"])
def test_every_process_draws_the_same_whatever_its_hash_salt(salt):
    code = (
        "from paravt.grpo import frame_budget; print([frame_budget(1, 0, s, [4, 8, 16]) for s in 'abcdefgh'])"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str([frame_budget(1, 0, s, [4, 8, 16]) for s in "abcdefgh"])


def test_the_order_in_which_choices_are_written_does_not_matter():
    for i in range(20):
        assert frame_budget(3, 0, f"s{i}", CHOICES) == frame_budget(3, 0, f"s{i}", CHOICES[::-1])


def test_draws_are_uniform():
    counts = Counter(frame_budget(1, epoch, f"s{i}", CHOICES) for epoch in range(10) for i in range(1000))
    assert set(counts) == set(CHOICES)
    # 10,000 draws: one standard deviation is 40; five of them are never seen by chance.
    assert all(abs(count - 2000) < 200 for count in counts.values())


def test_without_gating_the_largest_choice_is_taken():
    off = BudgetConfig(choices=[8, 64, 4], gating=False)
    assert {prompt_budget(off, 1, 0, f"s{i}") for i in range(20)} == {64}
    on = BudgetConfig(choices=[8, 64, 4])
    assert prompt_budget(on, 1, 0, "s1") == frame_budget(1, 0, "s1", [4, 8, 64])


def test_the_hash_is_fixed_for_all_time():
    # A changed hash would silently change every published run.
    assert stable_hash(1, 0, "sample") == stable_hash(1, 0, "sample") != stable_hash("1", 0, "sample")
    assert 0 <= stable_hash("é", None, 1.5) < 2**64
    assert [frame_budget(1, 0, f"s{i}", [4, 8, 16]) for i in range(6)] == [16, 4, 4, 16, 4, 16]
