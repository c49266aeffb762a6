"""The GRPO loop around a scripted engine: versions, budgets, epochs, failures, refusals."""

from __future__ import annotations

from dataclasses import replace
import json
import logging
import shutil

import pytest
import torch

from paravt.checkpoints import CheckpointError
from paravt.config import AnchoringConfig, EpisodeConfig
from paravt.engines import EngineError, TransformersEngine
from paravt.grpo import GRPOSetup, train
from paravt.grpo.batch import Group
from paravt.grpo.budget import frame_budget
from paravt.grpo.checks import warn_of_mismatch, why_untrained
from paravt.grpo.rollouts import check_budget
from paravt.hashing import items_of_step
from paravt.model import load_model
from paravt.rewards import Reward
from paravt.rollout import Sample
from tests.fakes import Prompt, ScriptedEngine
from tests.tiny import tiny_encoder, tiny_folder
from tests.training_world import EPISODE, grpo_setup, question, write_clips


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write_clips(folder)
    return folder


class Listener:
    """A reporter that keeps what it hears."""

    def __init__(self) -> None:
        self.values: list[dict] = []
        self.shown: list[list] = []
        self.told: list[tuple[int, int]] = []

    def metrics(self, values, step) -> None:
        self.values.append(dict(values) | {"step": step})

    def rollouts(self, rollouts, step) -> None:
        self.shown.append(list(rollouts))

    def progress(self, done, total, note="") -> None:
        self.told.append((done, total))


class WatchedEngine(ScriptedEngine):
    """Keeps what weights it was given."""

    def __init__(self, reply) -> None:
        super().__init__(tiny_encoder(), reply)
        self.loaded: list[tuple[str, int]] = []

    def load_weights(self, folder: str, version: int) -> None:
        assert load_model(folder).config.text_config.hidden_size == 32  # a whole folder
        self.loaded.append((folder, version))
        super().load_weights(folder, version)


class InMemory(WatchedEngine):
    """Takes tensors, and looks at them late, when training may have gone on."""

    takes_tensors = True

    def __init__(self, reply) -> None:
        super().__init__(reply)
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}

    def load_tensors(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        self.tensors[version] = tensors
        self.loaded.append(("", version))
        self.weight_version = version


def reply(prompt: Prompt) -> str:
    """Every other sample answers wrongly."""
    return f"look\n</think>\n<answer>{'AB'[prompt.sample % 2]}</answer>"


def run(clips, scratch, chosen: GRPOSetup, samples=None, engine=None, score_fn=None):
    listener = Listener()
    engine = engine or WatchedEngine(reply)
    samples = samples or [question(number) for number in range(3)]
    result = train(
        load_model(tiny_folder()),
        None,
        engine,
        tiny_encoder(),
        samples,
        chosen,
        listener,
        scratch,
        score_fn,
        video_root=clips,
    )
    rows = [json.loads(line) for line in result.metrics_path.read_text().splitlines()]
    return rows, listener, engine, result


def test_an_engine_of_its_own_gets_each_version_and_is_never_stale(clips, tmp_path):
    rows, _, engine, _ = run(clips, tmp_path, grpo_setup(steps=3))
    assert [version for _, version in engine.loaded] == [0, 1, 2, 3]
    assert [row["staleness"] for row in rows] == [0, 0, 0]


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_engine_that_takes_tensors_gets_those_that_others_get_as_a_folder(clips, tmp_path, staleness):
    """Copies of each version: what training does to the weights later does not reach them."""
    chosen = grpo_setup(steps=3, staleness=staleness)
    engine = InMemory(reply)
    rows, _, _, _ = run(clips, tmp_path / "memory", chosen, engine=engine)
    assert not (tmp_path / "memory" / "engine-weights").exists()
    assert [version for _, version in engine.loaded] == sorted(engine.tensors)
    by_folder, _, other, _ = run(clips, tmp_path / "disk", grpo_setup(steps=3))
    if not staleness:
        assert rows == by_folder
        assert len(engine.tensors) == 4
    first = load_model(tiny_folder()).state_dict()
    for name, tensor in engine.tensors[0].items():
        torch.testing.assert_close(tensor, first[name], rtol=0, atol=0)
    if not staleness:
        last = load_model(other.loaded[-1][0]).state_dict()
        assert engine.tensors[3].keys() == last.keys()
        for name, tensor in engine.tensors[3].items():
            torch.testing.assert_close(tensor, last[name], rtol=0, atol=0)
        assert any((last[name] != first[name]).any() for name in first)


def test_budgets_reach_the_decoder_and_epochs_meet_inside_a_step(clips, tmp_path):
    samples = [question(number) for number in range(3)]
    rows, listener, engine, _ = run(clips, tmp_path, grpo_setup(steps=4), samples)
    ids = [sample.id for sample in samples]
    for step, row in enumerate(rows):
        items = items_of_step(1, step, 2, ids)
        budgets = [frame_budget(1, item.epoch, ids[item.index], [2, 4]) for item in items]
        assert row["budget"] == row["frames_per_episode"] == sum(budgets) / 2
    assert [item.epoch for item in items_of_step(1, 1, 2, ids)] == [0, 1]
    for call in engine.calls:
        assert all(len(request.visuals) in (2, 4) for request in call)
    assert {rollout.frames_seen for rollout in listener.shown[0]} <= {2, 4}


def test_times_go_to_the_reporter_and_not_to_the_file(clips, tmp_path):
    rows, listener, _, _ = run(clips, tmp_path, grpo_setup(steps=2))
    assert not [key for row in rows for key in row if key.startswith("time/")]
    assert {"time/rollout_s", "time/train_share", "time/tokens_per_s"} <= listener.values[0].keys()
    assert [values["step"] for values in listener.values] == [1, 2]
    assert listener.told == [(1, 2), (2, 2)]
    assert len(listener.shown) == 1 and len(listener.shown[0]) == 4


def test_a_trainer_and_an_engine_that_disagree_are_pointed_at(clips, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "paravt"):
        run(clips, tmp_path, grpo_setup(steps=1))  # the script's log-probs are made up
    assert caplog.text.count("trainer and engine differ before any update: mean ratio") == 1


def test_a_group_whose_video_is_missing_is_counted_and_the_run_goes_on(clips, tmp_path, caplog):
    lost = Sample("lost", "missing.mp4", "Which shape?", "A", "mcq", ("circle", "square"))
    with caplog.at_level(logging.WARNING, "paravt"):
        rows, _, _, result = run(clips, tmp_path, grpo_setup(steps=2), [lost, question(1)])
    assert [row["groups_failed"] for row in rows] == [1, 1]
    assert [row["left_out/failed"] for row in rows] == [4, 4]
    assert result.counts == {"failed": 8}
    assert "sample lost: no reward: failed" in caplog.text
    assert all(row["update_skipped"] == 0 for row in rows)


def test_a_run_in_which_nothing_works_ends_with_the_reason(clips, tmp_path):
    lost = [Sample(f"lost{i}", "missing.mp4", "?", "A", "mcq", ("a", "b")) for i in range(2)]
    with pytest.raises(RuntimeError, match="no episode of 3 steps .*step 3: sample lost.: failed: .*missing"):
        run(clips, tmp_path, grpo_setup(steps=9), lost)


def test_totals_that_are_missing_train_nothing_and_are_counted(clips, tmp_path):
    def unknown(rollout, sample):
        return Reward(None, None, None, (), None, ("accuracy: the judge's verdict is missing",))

    rows, _, _, result = run(clips, tmp_path, grpo_setup(steps=2), score_fn=unknown)
    assert result.counts == {"no_reward": 16}
    assert [row["update_skipped"] for row in rows] == [1, 1]
    assert all("reward/total" not in row for row in rows)
    with pytest.raises(RuntimeError, match="no episode of 3 steps in a row had a reward.*verdict is missing"):
        run(clips, tmp_path / "longer", grpo_setup(steps=4), score_fn=unknown)


def test_steps_without_a_reward_are_counted_over_a_resume(clips, tmp_path):
    asked = []

    def unknown(rollout, sample):
        asked.append(sample.id)
        if len(asked) > 2 * 8:  # 2 prompts a step, 4 episodes each
            raise KeyboardInterrupt
        return Reward(None, None, None, (), None, ("accuracy: the judge's verdict is missing",))

    setup = grpo_setup(steps=4, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        run(clips, tmp_path, setup, score_fn=unknown)
    asked.clear()
    with pytest.raises(RuntimeError, match="of 3 steps in a row had a reward; the last, in step 3"):
        run(clips, tmp_path, setup, score_fn=unknown)
    assert len(asked) == 8


def test_how_often_a_run_saves_is_no_part_of_what_it_is_and_its_samples_are(clips, tmp_path):
    run(clips, tmp_path, grpo_setup(steps=1, save_every=1))
    run(clips, tmp_path, grpo_setup(steps=1, save_every=3))  # goes on, and finds that all is done
    changed = [replace(question(0), answer="B"), question(1), question(2)]
    with pytest.raises(CheckpointError, match="other parameters or data"):
        run(clips, tmp_path, grpo_setup(steps=1), changed)


def test_a_run_that_moved_no_weight_says_why(clips, tmp_path):
    *_, result = run(clips, tmp_path, grpo_setup(steps=2))
    assert why_untrained(result.metrics) == ""
    same = Reward(1.0, 0.5, 0.0, (), 1.5)
    *_, result = run(clips, tmp_path / "same", grpo_setup(steps=2), score_fn=lambda rollout, sample: same)
    words = why_untrained(result.metrics)
    assert words.startswith(
        "none of 2 steps changed a weight: in 100% of the groups all totals are equal, the mean format "
        "reward is 0.50; "
    )


def test_another_temperature_shows_in_the_kl_where_the_mean_ratio_is_1(caplog):
    warn_of_mismatch({"ratio_before": 1.001, "mismatch_kl": 0.004})
    assert not caplog.text
    warn_of_mismatch({"ratio_before": 1.001, "mismatch_kl": 0.05})
    assert "KL 0.0500 nats a token" in caplog.text


def test_greedy_groups_repeated_ids_and_a_moving_reference_are_refused(clips, tmp_path):
    with pytest.raises(ValueError, match="temperature is 0"):
        chosen = grpo_setup()
        greedy = EpisodeConfig(**EPISODE.model_dump() | {"temperature": 0.0})
        GRPOSetup(1, chosen.visual, chosen.budget, greedy, chosen.reward, AnchoringConfig(), chosen.grpo)
    with pytest.raises(ValueError, match="same id"):
        run(clips, tmp_path, grpo_setup(), [question(1), question(1)])
    model = load_model(tiny_folder())
    with pytest.raises(ValueError, match="frozen start"):
        train(model, model, None, tiny_encoder(), [question(1)], grpo_setup(), Listener(), tmp_path)


def test_frames_that_do_not_fit_the_budget_end_the_run(clips, tmp_path):
    _, listener, _, _ = run(clips, tmp_path, grpo_setup(steps=1))
    rollouts = listener.shown[0]
    group = Group(question(0), 0, rollouts[0].frame_budget, rollouts, [])
    check_budget(group)
    rollouts[0].frames_seen += 1
    with pytest.raises(RuntimeError, match="the budget is"):
        check_budget(group)


def test_rollouts_ahead_are_drawn_as_without_and_never_too_old(clips, tmp_path):
    """The script answers by the prompt alone, so that the same draws give the same episodes."""
    turns, _, _, _ = run(clips, tmp_path / "in turn", grpo_setup(steps=5))
    ahead, listener, engine, _ = run(clips, tmp_path / "ahead", grpo_setup(steps=5, staleness=2))
    for name in ("reward/total", "budget", "compliance", "tokens_per_episode"):
        assert [row[name] for row in ahead] == [row[name] for row in turns]
    assert ahead[0]["staleness"] == 0
    assert all(0 <= row["staleness"] <= 2 for row in ahead)
    assert max(row["staleness"] for row in ahead) > 0
    versions = [version for _, version in engine.loaded]
    assert versions == sorted(set(versions)) and versions[0] == 0
    assert all("time/rollout_ahead_s" in values for values in listener.values)
    kept = sorted(int(folder.name) for folder in (tmp_path / "ahead" / "engine-weights").iterdir())
    assert kept[-1] == 5 and kept[0] == versions[-1]  # what the engine has, and what is newer


def test_rollouts_ahead_go_on_after_a_stop_with_the_checkpoints_weights(clips, tmp_path):
    run(clips, tmp_path, grpo_setup(steps=4, staleness=1, save_every=2))
    [last] = tmp_path.glob("step-*4")
    shutil.rmtree(last)  # as if killed in step 3 or 4
    rows, _, engine, _ = run(clips, tmp_path, grpo_setup(steps=4, staleness=1, save_every=2))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert engine.loaded[0][1] == 2 and rows[2]["staleness"] == 0


def test_an_engine_that_dies_ahead_ends_the_run_with_its_words(clips, tmp_path):
    class Dying(WatchedEngine):
        def generate(self, requests):
            if len(self.calls) == 3:
                raise EngineError("the servers are gone")
            return super().generate(requests)

    with pytest.raises(EngineError, match="servers are gone"):
        run(clips, tmp_path, grpo_setup(steps=9, staleness=1), engine=Dying(reply))


def test_rollouts_ahead_need_weights_of_their_own(clips, tmp_path):
    model = load_model(tiny_folder())
    engine = TransformersEngine(model, tiny_encoder().end_ids)
    chosen = grpo_setup(staleness=1)
    with pytest.raises(
        ValueError, match="grpo.staleness is 1, but the engine samples from the weights that are"
    ):
        train(
            model, None, engine, tiny_encoder(), [question(1)], chosen, Listener(), tmp_path, video_root=clips
        )
