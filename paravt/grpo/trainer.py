"""PARA-GRPO, step by step.

    visit     the step's prompts, in an order that follows from (seed, epoch, sample id)
    gate      K overview frames for each prompt and epoch (`budget`)
    roll out  a group of episodes per prompt (`agent`), with the weights as they are; those that teach
              nothing may be replaced (`refill`)
    reward    each episode by its record (`rewards`); what has no reward is left out and counted
    credit    group advantages of the totals, anchors on structural tokens (`advantages`, `anchors`)
    update    one optimiser step on the clipped, importance-corrected loss (`loss`)
    sync      the engine takes the new weights and their version

One update is made per batch, so the policy at the start of the step is the policy itself: the PPO ratio is 1
and the clip is idle, while the importance correction covers what engine and trainer compute differently.
A step in which no token has an advantage changes no weight: with the policy-gradient term at 0, Adam would
turn the small pull towards the frozen start into a step of full length.

Several processes share a step (`parallel`): each rolls out its own prompts, groups whole, and what is drawn
follows from (seed, step, sample id), whoever draws it. Where only the first process has an engine, as with
servers that all would share, it rolls out for all of them and deals the groups out.

Rollout and training take turns; with `staleness` the rollouts of the next steps are made meanwhile (`ahead`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
import copy
from dataclasses import dataclass, field
from functools import partial
import logging
from pathlib import Path
import time

import torch
from tqdm import tqdm
from transformers import Qwen3VLForConditionalGeneration

from paravt.chat import ChatEncoder
from paravt.engines.base import Engine
from paravt.grpo.ahead import Ahead
from paravt.grpo.batch import (
    Group,
    MicroBatch,
    StepRows,
    StepTotals,
    blank_micro_batch,
    make_micro_batches,
    step_rows,
    step_totals,
)
from paravt.grpo.checks import empty_steps, warn_of_mismatch
from paravt.grpo.handover import Handover
from paravt.grpo.loss import Denominators, LossInputs, LossOutput, kl_to_go, mean_metrics, policy_loss
from paravt.grpo.metrics import step_metrics
from paravt.grpo.rollouts import Rolled, Score, StepRollouts, rewarded
from paravt.grpo.setup import GRPOSetup
from paravt.model import Batch, TokenScores
from paravt.reporter import Reporter
from paravt.rewards import score
from paravt.rollout import Sample
from paravt.training import TrainingRun, TrainResult

log = logging.getLogger("paravt")

SHOW_EVERY = 5  # steps between rollouts that are handed to the reporter
MOST_EMPTY = 3  # steps in a row in which no episode had a reward


def train(
    model: Qwen3VLForConditionalGeneration,
    ref_model: Qwen3VLForConditionalGeneration | None,
    engine: Engine | None,
    encoder: ChatEncoder,
    samples: Sequence[Sample],
    setup: GRPOSetup,
    reporter: Reporter,
    scratch_dir: str | Path,
    score_fn: Score | None = None,
    video_root: str | Path = ".",
) -> TrainResult:
    """Train `model` in place for `setup.grpo.steps` steps, from the last checkpoint in `scratch_dir` if any.

    `ref_model` is the frozen start; None copies `model` as it is handed in, if the KL needs it and adapters
    do not make it needless. An engine whose `.model` is `model` samples from the weights in place; any
    other one is given a copy after each step. Of several processes each brings an engine, or the first
    one alone. Raises CheckpointError (disk, or a checkpoint of another run), NonFiniteLoss, EngineError,
    ValueError (no samples, or ids that repeat), RuntimeError (three steps in a row without any reward).
    """
    ids = [sample.id for sample in samples]
    if len(set(ids)) != len(ids):
        raise ValueError("two samples have the same id; the order of training could not tell them apart")
    config = setup.grpo
    if ref_model is model:
        raise ValueError("the frozen start is the model that is trained; give a copy, or None")
    needs_start = config.kl != "none"
    if needs_start and ref_model is None and setup.train.lora is None:
        ref_model = copy.deepcopy(model)
    run = TrainingRun(
        model,
        config.optimiser,
        steps=config.steps,
        save_every=config.save_every,
        keep=config.keep_checkpoints,
        frozen_vision=config.freeze_vision,
        scratch_dir=scratch_dir,
        identity=[*setup.identity(), [sample.to_json() for sample in samples]],
        train=setup.train,
    )
    start = run.frozen_start(ref_model) if needs_start else None
    score_fn = score_fn or partial(score, config=setup.reward)
    loop = _Loop(run, start, engine, encoder, samples, setup, score_fn, video_root)
    hidden = None if run.is_first else True
    with (
        loop.rollouts_ahead(),
        tqdm(total=config.steps, initial=run.done, desc="grpo", unit="step", disable=hidden) as bar,
    ):
        loop.sync(run.done)
        for step in run.remaining:
            clock = Clock()
            with clock.measure("rollout"):
                episodes = loop.roll_out(step)
            with clock.measure("reward"):
                groups = [g if g.rewards else rewarded(g, setup, score_fn) for g in episodes]
                rows = step_rows(encoder, groups, config, setup.anchoring)
                totals = step_totals(run.processes, groups, rows, setup.episode.max_new_tokens)
                loop.count(step, totals)
            with clock.measure("train"):
                values = step_metrics(totals, version=step) | loop.refill_metrics()
                values |= loop.update(step, rows, totals)
            with clock.measure("sync"):
                loop.sync(step + 1)
            kept = run.finish_step(step, values)
            if not run.is_first:
                continue
            reporter.metrics(kept | clock.metrics(kept) | loop.times, step + 1)
            if step % SHOW_EVERY == 0:
                reporter.rollouts(groups[0].rollouts, step + 1)
            reporter.progress(step + 1, config.steps, f"reward {kept.get('reward/total', 0):.2f}")
            bar.set_postfix(reward=f"{kept.get('reward/total', 0):.2f}")
            bar.update()
    return run.result()


@dataclass
class _Loop:
    """The parts of a step, with what they share."""

    run: TrainingRun
    frozen_start: Callable[[Batch, float], TokenScores] | None
    engine: Engine | None
    encoder: ChatEncoder
    samples: Sequence[Sample]
    setup: GRPOSetup
    score_fn: Score
    video_root: str | Path
    refills: Counter[str] = field(default_factory=Counter)
    times: dict[str, float] = field(default_factory=dict)
    ahead: Ahead[Rolled] | None = None

    def __post_init__(self) -> None:
        brought = self.run.processes.gather(self.engine is not None)
        if not brought[0]:
            raise ValueError("the first process has no engine; give it one")
        self.first_step = self.run.done  # of this process: the engine has just been given the weights
        self.empty_steps = empty_steps(self.run.metrics())
        self.deals = not all(brought)
        self.handover = Handover(self.run, self.engine, self.encoder.tokenizer)
        if self._shares_weights and self.run.processes.sharded:
            raise ValueError("weights are split over processes; give the engine a model of its own")
        if self._shares_weights and self.setup.grpo.staleness:
            raise ValueError(
                f"grpo.staleness is {self.setup.grpo.staleness}, but the engine samples from the weights "
                "that are trained; give it a model of its own, or write 0"
            )

    @property
    def _shares_weights(self) -> bool:
        return getattr(self.engine, "model", None) is self.run.model

    @contextmanager
    def rollouts_ahead(self) -> Iterator[None]:
        """A context in which the next steps are rolled out while this one trains, if so configured."""
        staleness = self.setup.grpo.staleness
        if not staleness or self.engine is None:
            yield
            return
        # a tokenizer of its own: the trainer reads tags with the other one meanwhile
        rollouts = self._rollouts(copy.deepcopy(self.encoder))
        with Ahead(
            lambda step: rollouts.roll_out(step, self._places),
            self.handover.give,
            self.run.remaining,
            staleness,
        ) as self.ahead:
            yield

    def _rollouts(self, encoder: ChatEncoder) -> StepRollouts:
        # an engine that samples from the trained weights computes as their passes do
        around = self.run.accelerator.autocast if self._shares_weights else nullcontext
        return StepRollouts(
            self.engine, encoder, self.samples, self.setup, self.score_fn, self.video_root, around
        )

    @property
    def _places(self) -> list[int]:
        """The places of a step that this process rolls out; all of them if it deals them out."""
        places = range(self.setup.grpo.prompts_per_step)
        return list(places) if self.deals else self.run.processes.share(places)

    def roll_out(self, step: int) -> list[Group]:
        """This process's groups of the step."""
        rolled = Rolled([])
        if self.ahead:
            made = self.ahead.take(step)
            rolled, self.times = made.value, {"time/rollout_ahead_s": made.seconds}
        elif self.engine is not None:
            rolled = self._rollouts(self.encoder).roll_out(step, self._places)
        self.refills = rolled.refills
        if not self.deals:
            return rolled.groups
        return self.run.processes.deal(rolled.groups if self.run.is_first else None)

    def refill_metrics(self) -> dict[str, float]:
        """What refilling took in this step, over all processes."""
        if not self.setup.grpo.refill_limit:
            return {}
        total = sum(self.run.processes.gather(self.refills), Counter())
        return {f"refill/{name}": float(total[name]) for name in ("rolled", "empty")}

    def count(self, step: int, totals: StepTotals) -> None:
        """Log and count what is left out. Raises RuntimeError when nothing has worked for three steps."""
        groups = totals.groups
        for reason, number in sorted(totals.left_out.items()):
            self.run.count(reason, number)
        for group in groups if self.run.is_first else ():
            pairs = zip(group.rollouts, group.rewards, strict=True)
            words = {"; ".join(reward.reasons) for _, reward in pairs if reward.total is None}
            for why in sorted(words):
                log.warning("step %d, sample %s: no reward: %s", step + 1, group.sample.id, why)
        empty = all(reward.total is None for group in groups for reward in group.rewards)
        self.empty_steps = self.empty_steps + 1 if empty else 0
        if self.empty_steps == MOST_EMPTY:
            raise RuntimeError(
                f"no episode of {MOST_EMPTY} steps in a row had a reward; the last, in step {step + 1}: "
                f"sample {groups[-1].sample.id}: {'; '.join(groups[-1].rewards[-1].reasons)}"
            )

    def update(self, step: int, rows: StepRows, totals: StepTotals) -> dict[str, float]:
        """One update on the step's rows; metrics of the loss."""
        config, processes = self.setup.grpo, self.run.processes
        denominators = totals.denominators
        trains = totals.has_signal or (config.entropy_weight > 0 and denominators.sequences > 0)
        outputs, loss = [], 0.0
        for micro_batch in self.run.passes(make_micro_batches(rows.rows, config.micro_batch_tokens)):
            micro_batch = micro_batch or blank_micro_batch()
            with torch.set_grad_enabled(trains):
                output = self._loss(micro_batch.to(self.run.accelerator.device), denominators)
            loss += self.run.backward(output.loss) if trains else output.loss.item()
            outputs.append(output.detached())
        loss = processes.total(loss)
        outputs = [output for part in processes.gather(outputs) for output in part]
        values = mean_metrics(outputs) | {
            "loss": loss,
            "non_finite_steps": self.run.non_finite,
            "loss_tokens": denominators.tokens,
            "update_skipped": float(not trains),
        }
        if step == self.first_step:
            warn_of_mismatch(values)
        if trains:
            values |= self.run.update(step, loss, [group.sample.id for group in totals.groups])
        return values

    def sync(self, version: int) -> None:
        """Give the engine the present weights. One that shares the module only takes the version; one that
        is ahead takes them before its next step.
        """
        if all(self.run.processes.gather(self._shares_weights)):
            self.engine.weight_version = version
            return
        self.handover.put(version)
        loaded: int | None = version
        if self.ahead:
            self.ahead.offer(version)
            loaded = self.ahead.loaded
        elif self.engine is not None:
            self.handover.give(version)
        self.handover.forget_before(self.run.processes.gather(loaded))

    def _loss(self, micro_batch: MicroBatch, denominators: Denominators) -> LossOutput:
        config, temperature = self.setup.grpo, self.setup.episode.temperature
        batch = micro_batch.batch
        scores = self.run.scores(batch, temperature, entropy_grad=config.entropy_weight > 0)
        ref_logprobs, advantages = None, micro_batch.advantages
        if self.frozen_start is not None:
            ref_logprobs = self.frozen_start(batch, temperature).logprobs
        if config.kl == "reward":
            to_go = kl_to_go(batch.engine_logprobs, ref_logprobs, batch.loss_mask, config.kl_weight)
            advantages = advantages + to_go
        inputs = LossInputs(
            policy_logprobs=scores.logprobs,
            proximal_logprobs=scores.logprobs.detach(),
            engine_logprobs=batch.engine_logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages,
            loss_mask=batch.loss_mask,
            entropy=scores.entropy,
            structural=micro_batch.structural,
            denominators=denominators,
        )
        return policy_loss(inputs, config)


@dataclass
class Clock:
    """Seconds of the parts of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Seconds and shares of each part, and speed from what `values` say was written and read."""
        total = max(sum(self.seconds.values()), 1e-9)
        made = {f"time/{part}_s": seconds for part, seconds in self.seconds.items()}
        made |= {f"time/{part}_share": seconds / total for part, seconds in self.seconds.items()}
        for name in ("tokens", "frames"):
            made[f"time/{name}_per_s"] = values.get(f"{name}_per_episode", 0.0) * values["episodes"] / total
        return made | {"time/step_s": total}
