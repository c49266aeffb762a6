"""Dynamic sampling: which prompts take the places of groups that teach nothing, and what is counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.grpo.refill import Refilled, refill, replacement, reserve_of_step
from paravt.hashing import Item, items_of_step
from tests.training_world import grpo_setup, question
from tests.unit.test_grpo_trainer import WatchedEngine, clips, reply, run  # noqa: F401 - a fixture

IDS = [f"q{number}" for number in range(9)]
ITEMS = [Item(4, 7), Item(4, 2), Item(5, 0)]


class World:
    """Groups are the indices of their prompts; some of them teach nothing."""

    def __init__(self, useless: set[int], limit: int) -> None:
        self.useless = useless
        self.limit = limit
        self.reserve = reserve_of_step(1, 3, ITEMS, IDS)
        self.rolled: list[Item] = []

    def roll_out(self, visits) -> list[int]:
        self.rolled += visits
        return [item.index for item in visits]

    def refilled(self, places=(0, 1, 2)) -> Refilled:
        return refill(
            {place: ITEMS[place].index for place in places},
            self.limit,
            lambda group: group not in self.useless,
            lambda place, round_: replacement(place, round_, ITEMS, self.reserve),
            self.roll_out,
        )


def test_groups_with_signal_are_kept_and_nothing_is_rolled_out():
    world = World(set(), 3)
    assert world.refilled() == Refilled([7, 2, 0])
    assert world.rolled == []


def test_a_place_without_signal_goes_to_the_next_prompt_of_the_reserve():
    world = World({2}, 1)
    assert world.refilled() == Refilled([7, world.reserve[1], 0], rolled=1)
    assert world.rolled == [Item(4, world.reserve[1])]  # the epoch of the place: its budget is drawn with it


def test_rounds_end_at_the_limit_and_an_empty_place_keeps_its_first_group():
    for limit in (0, 1, 2):
        world = World(set(range(9)), limit)
        assert world.refilled() == Refilled([7, 2, 0], rolled=3 * limit, empty=3)
    assert len({item.index for item in world.rolled}) == 6  # no prompt twice in a step


def test_the_reserve_runs_out():
    world = World(set(range(9)), 50)
    assert world.refilled() == Refilled([7, 2, 0], rolled=6, empty=3)


def test_the_reserve_holds_all_others_once_and_changes_with_step_and_seed():
    reserves = {(seed, step): reserve_of_step(seed, step, ITEMS, IDS) for seed in (1, 2) for step in range(4)}
    assert all(sorted(reserve) == [1, 3, 4, 5, 6, 8] for reserve in reserves.values())
    assert len({tuple(reserve) for reserve in reserves.values()}) > 4
    assert reserve_of_step(1, 3, ITEMS, IDS) == reserves[1, 3]


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 8)), st.integers(0, 3))
def test_two_processes_fill_the_places_as_one_does(useless, limit):
    alone = World(useless, limit).refilled()
    first, second = World(useless, limit).refilled([0, 2]), World(useless, limit).refilled([1])
    assert [first.groups[0], second.groups[0], first.groups[1]] == alone.groups
    assert (first.rolled + second.rolled, first.empty + second.empty) == (alone.rolled, alone.empty)


def by_question(useless: str):
    """One question is answered the same by all; others by turns."""

    def answer(prompt) -> str:
        return "look\n</think>\n<answer>B</answer>" if useless in prompt.text else reply(prompt)

    return answer


@pytest.mark.parametrize("limit", [0, 2])
def test_a_run_refills_and_counts(clips, tmp_path, limit):  # noqa: F811 - the fixture
    samples = [question(number) for number in range(4)]  # two of them ask for the circle part
    engine = WatchedEngine(by_question("circle part"))
    chosen = grpo_setup(steps=2, refill_limit=limit)
    rows, _, _, _ = run(clips, tmp_path, chosen, samples, engine)
    ids = [sample.id for sample in samples]
    for step, row in enumerate(rows):
        asked = [samples[item.index] for item in items_of_step(1, step, 2, ids)]
        useless = sum("circle part" in sample.question for sample in asked)
        if not limit:
            assert row["groups_without_spread"] == useless / 2
            assert "refill/rolled" not in row
            continue
        assert row["groups_without_spread"] == row["refill/empty"] / 2
        assert row["episodes"] == 8  # no step is short
        others = {0, 1, 2, 3} - {item.index for item in items_of_step(1, step, 2, ids)}
        teaching = [index for index in others if "circle part" not in samples[index].question]
        assert (row["refill/rolled"] > 0) == (useless > 0)
        assert row["refill/empty"] >= useless - len(teaching)
