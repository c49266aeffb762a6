"""What SFT and GRPO share: an optimiser, its schedule, micro-batches, metrics, and a run that can be killed.

A step is a function of (seed, step, weights, optimiser state): which samples it visits, which frames they
get and what is sampled follow from hashes, the learning rate from a formula. A checkpoint holds the rest
(weights, optimiser, generators, counters, the metrics so far), so a run that was killed at any moment and
started again ends with the same weights, bit for bit on one machine, and the same metrics file.

    learning rate(step) = peak x min(1, (step + 1) / warm-up)
                               x 1 | (1 + cos(pi (step - warm-up) / (steps - warm-up))) / 2

(the last factor is 1 for a constant schedule, the other for a cosine one)

metrics.jsonl has one line a step and no times: two runs of the same thing write the same bytes.

Several processes (`parallel`) share each step and know the same; the first one writes. A checkpoint of any
number of processes, weights whole or split, is gone on from by any other number (`state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
import json
import logging
import math
from pathlib import Path
from typing import TypeVar

from accelerate.utils import fsdp2_prepare_model
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3VLForConditionalGeneration

from paravt import checkpoints
from paravt.checkpoints import CheckpointError
from paravt.config import OptimiserConfig, TrainConfig
from paravt.hashing import stable_hash
from paravt.lora import adapters_off, add_adapters
from paravt.model import Batch, Scorer, TokenScores, blank_batch
from paravt.parallel import Processes
from paravt.state import load_shards, load_whole_state, start_digest, whole_state, write_shards

log = logging.getLogger("paravt")

METRICS = "metrics.jsonl"
STATE = "state.pt"
MOST_NON_FINITE = 3  # steps in a row

T = TypeVar("T")


class NonFiniteLoss(RuntimeError):
    """The loss stayed NaN or infinite; the message names the step and its samples."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run: steps done, the metrics of each and the file that holds them, and what was counted."""

    steps: int
    metrics_path: Path
    counts: dict[str, int]
    metrics: list[dict[str, float]]


def learning_rate(config: OptimiserConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`."""
    warmup = round(config.warmup_share * steps)
    rate = config.learning_rate * min(1.0, (step + 1) / max(warmup, 1))
    if config.schedule == "cosine":
        progress = max(0, step - warmup) / max(1, steps - warmup)
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
    return rate


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of rows of like length, each batch of at most `max_tokens` tokens, padding counted.

    Shortest rows first, ties by position. A row that is longer than `max_tokens` is a batch of its own.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[position] <= max_tokens:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def freeze_vision(model: Qwen3VLForConditionalGeneration, frozen: bool) -> None:
    """Keep or train the vision tower with its mergers; all other weights are trained."""
    model.requires_grad_(True)
    model.model.visual.requires_grad_(not frozen)


class TrainingRun:
    """The state of one training, from its scratch folder if it was stopped before.

    `identity` is everything that the run depends on beside the weights of `model`, as JSON data; a checkpoint
    of another identity or another start is refused with a CheckpointError. `train` says how it lies on the
    machine, which is no part of it.
    """

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        optimiser: OptimiserConfig,
        *,
        steps: int,
        save_every: int,
        keep: int,
        frozen_vision: bool,
        scratch_dir: str | Path,
        identity: object,
        train: TrainConfig | None = None,
    ) -> None:
        train = train or TrainConfig()
        self.steps, self.save_every, self.keep = steps, save_every, keep
        self.config = optimiser
        self.scratch = Path(scratch_dir)
        self.scratch.mkdir(parents=True, exist_ok=True)
        identity = [identity, start_digest(model)]
        self.fingerprint = stable_hash(json.dumps(identity, sort_keys=True, default=str))
        self.done = 0
        self.non_finite = self.non_finite_in_a_row = 0
        self.counts: dict[str, int] = {}
        self.lines: list[str] = []

        self.dtype = getattr(torch, train.dtype)
        self.processes = Processes(self.dtype)
        self.accelerator = self.processes.accelerator
        self.lora = train.lora
        self.model = model
        freeze_vision(model, frozen_vision)
        if train.lora:
            add_adapters(model, train.lora, self.fingerprint)
        self._set_dtypes()
        if train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()  # only then does it take place; there is no dropout that this would switch on
        scorer = Scorer(model, whole_graph=self.processes.count > 1)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        adam = torch.optim.AdamW(
            weights,
            lr=optimiser.learning_rate,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
        )
        self.scorer, self.optimiser = self.accelerator.prepare(scorer, adam)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._resume()

    @property
    def metrics_path(self) -> Path:
        return self.scratch / METRICS

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.processes.is_first

    @property
    def remaining(self) -> range:
        """The steps that are still to do."""
        return range(self.done, self.steps)

    def passes(self, batches: Sequence[T]) -> Iterator[T | None]:
        """The micro-batches of this process's share; None where it only keeps the others company."""
        return self.processes.passes(self.scorer, batches)

    def scores(self, batch: Batch | None, temperature: float, entropy_grad: bool = False) -> TokenScores:
        """A pass through the model, with gradient; None for a micro-batch that only keeps company."""
        batch = (batch or blank_batch()).to(self.accelerator.device)
        return TokenScores(*self.scorer(batch, temperature, entropy_grad))

    def frozen_start(
        self, model: Qwen3VLForConditionalGeneration | None = None
    ) -> Callable[[Batch, float], TokenScores]:
        """A function that scores batches, without gradient, by the weights that training started from.

        `model` holds them; None if they are those of the trained model without its adapters.
        """
        if model is None:

            def score(batch: Batch, temperature: float) -> TokenScores:
                with torch.no_grad(), adapters_off(self.model):
                    return self.scores(batch, temperature)

            return score
        scorer = Scorer(model.requires_grad_(False).eval().to(self._frozen_dtype(model)))
        scorer = self._split(scorer) if self.processes.sharded else scorer.to(self.accelerator.device)

        def score(batch: Batch, temperature: float) -> TokenScores:
            with torch.no_grad(), self._autocast():
                scores = TokenScores(*scorer(batch.to(self.accelerator.device), temperature))
            if self.processes.sharded:
                scorer.reshard()  # without a backward pass nothing else would
            return scores

        return score

    def backward(self, loss: torch.Tensor) -> float:
        """Add the gradient of one micro-batch's part of the loss; the value of that part."""
        # accelerate takes the mean over processes, the loss has the denominators of the whole step
        self.accelerator.backward(loss * self.processes.count if self.processes.count > 1 else loss)
        return loss.item()

    def update(self, step: int, loss: float, sample_ids: Sequence[str]) -> dict[str, float]:
        """One optimiser step on the gradients gathered; metrics. `loss` is that of the whole step.

        A loss or gradient that is not finite changes no weight and is counted; the third in a row raises
        NonFiniteLoss.
        """
        rate = learning_rate(self.config, step, self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        norm = self.accelerator.clip_grad_norm_(self.trained, self.config.clip_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimiser.step()
            self.non_finite_in_a_row = 0
        else:
            self.non_finite += 1
            self.non_finite_in_a_row += 1
            log.warning("step %d: loss %s, gradient norm %s; no weight was changed", step + 1, loss, norm)
        self.optimiser.zero_grad()
        if self.non_finite_in_a_row >= MOST_NON_FINITE:
            raise NonFiniteLoss(
                f"the loss was not a finite number in {MOST_NON_FINITE} steps in a row; the last was step "
                f"{step + 1}, samples {', '.join(sample_ids)}"
            )
        return {"loss": loss, "grad_norm": norm, "learning_rate": rate, "non_finite_steps": self.non_finite}

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of all finished steps, those before a resume too."""
        return [json.loads(line) for line in self.lines]

    def count(self, reason: str, by: int = 1) -> None:
        """Count something that was left out, by its reason; the counts survive a resume."""
        self.counts[reason] = self.counts.get(reason, 0) + by

    def finish_step(self, step: int, values: Mapping[str, float | None]) -> dict[str, float]:
        """Write the step's line, save if due; the finite values. `step` counts from 0, the line from 1.

        A value that is not finite is left out of the line and counted by its name.
        """
        known = {key: value for key, value in values.items() if value is not None}
        kept = {key: value for key, value in known.items() if math.isfinite(value)}
        for key in sorted(known.keys() - kept.keys()):
            self.count(f"not finite: {key}")
            log.warning("step %d: %s is %s; the metrics leave it out", step + 1, key, known[key])
        line = {"step": step + 1} | {key: round(float(value), 9) for key, value in kept.items()}
        self.lines.append(json.dumps(line))
        self._write_metrics("a", self.lines[-1] + "\n")
        self.done = step + 1
        if self.done % self.save_every == 0 or self.done == self.steps:
            self._save()
        return kept

    def result(self) -> TrainResult:
        """The finished run. Raises RuntimeError if steps are left."""
        if self.done != self.steps:
            raise RuntimeError(f"the run ended after {self.done} of {self.steps} steps")
        return TrainResult(self.done, self.metrics_path, dict(self.counts), self.metrics())

    def _set_dtypes(self) -> None:
        """Trained weights in float32 beside passes of lower precision; frozen ones in that of the passes."""
        if self.dtype == torch.float32:
            return
        self.model.to(self.accelerator.device)  # the host need not hold them in float32, once a process
        for weight in self.model.parameters():
            weight.data = weight.data.to(torch.float32 if weight.requires_grad else self.dtype)

    def _frozen_dtype(self, model: Qwen3VLForConditionalGeneration) -> torch.dtype:
        return model.dtype if self.dtype == torch.float32 else self.dtype

    def _autocast(self) -> AbstractContextManager:
        """What accelerate puts around the passes of the trained model, for those of another one."""
        return nullcontext() if self.processes.sharded else self.accelerator.autocast()

    def _split(self, scorer: Scorer) -> Scorer:
        """A second model, split as the trained one is."""
        return fsdp2_prepare_model(self.accelerator, scorer)

    def _write_metrics(self, mode: str, text: str) -> None:
        if not self.is_first:
            return
        try:
            with open(self.metrics_path, mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            why = checkpoints.reason(error)
            raise CheckpointError(f"cannot write {self.metrics_path}: {why}") from error

    def _save(self) -> None:
        """A checkpoint of this step. The first process makes the folder, seals it and says how it went."""
        told = words = None
        if self.is_first:

            def write(folder: Path) -> None:
                nonlocal told
                told = self.processes.tell(folder)
                self._write(folder)

            try:
                checkpoints.save(self.scratch, self.done, write, self.keep)
            except CheckpointError as error:
                words = str(error)
            if told is None:
                self.processes.tell(None)
        elif folder := self.processes.tell():
            try:
                self._write(folder)
            except OSError as error:  # the first process has met it too, and has the words
                log.debug("step %d: %s", self.done, error)
        words = self.processes.tell(words)
        if words:
            raise CheckpointError(words)

    def _write(self, folder: Path) -> None:
        """What this process has to put into a checkpoint."""
        adam = self.optimiser.optimizer
        if self.processes.sharded:
            write_shards(folder, self.model, adam)
        if not self.is_first:
            return
        state = {
            "fingerprint": self.fingerprint,
            "random": checkpoints.random_state(),
            "non_finite": (self.non_finite, self.non_finite_in_a_row),
            "counts": self.counts,
            "optimised": bool(adam.state),
        }
        if not self.processes.sharded:
            state |= whole_state(self.model, adam, trained_only=self.lora is not None)
        checkpoints.save_tensors(folder / STATE, state)
        (folder / METRICS).write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")

    def _resume(self) -> None:
        found = checkpoints.latest(self.scratch)
        self.processes.wait()  # nobody has begun to write
        if found:
            state = checkpoints.load_tensors(found.folder / STATE)
            if state["fingerprint"] != self.fingerprint or found.step > self.steps:
                raise CheckpointError(
                    f"{found.folder} belongs to a run with other parameters or data; remove {self.scratch} "
                    "to start anew, or give another folder"
                )
            adam = self.optimiser.optimizer
            if "model" in state:
                load_whole_state(state, self.model, adam, trained_only=self.lora is not None)
            else:
                load_shards(found.folder, self.model, adam, state["optimised"])
            checkpoints.restore_random_state(state["random"])
            self.non_finite, self.non_finite_in_a_row = state["non_finite"]
            self.counts = state["counts"]
            self.lines = (found.folder / METRICS).read_text(encoding="utf-8").splitlines()
            self.done = found.step
            log.info("resuming after step %d of %d from %s", self.done, self.steps, found.folder)
        self._write_metrics("w", "".join(line + "\n" for line in self.lines))
