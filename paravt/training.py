"""What SFT and GRPO share: an optimiser, its schedule, micro-batches, metrics, and a run that can be killed.

A step is a function of (seed, step, weights, optimiser state): which samples it visits, which frames they
get and what is sampled follow from hashes, the learning rate from a formula. A checkpoint holds the rest
(weights, optimiser, generators, counters, the metrics so far), so a run that was killed at any moment and
started again ends with the same weights, bit for bit on one machine, and the same metrics file.

    learning rate(step) = peak x min(1, (step + 1) / warm-up)
                               x 1 | (1 + cos(pi (step - warm-up) / (steps - warm-up))) / 2

(the last factor is 1 for a constant schedule, the other for a cosine one)

metrics.jsonl has one line a step and no times: two runs of the same thing write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import json
import logging
import math
import os
from pathlib import Path
import re

from accelerate import Accelerator
from safetensors import SafetensorError
import torch
from transformers import Qwen3VLForConditionalGeneration

from paravt import checkpoints
from paravt.checkpoints import CheckpointError
from paravt.config import OptimiserConfig
from paravt.hashing import stable_hash
from paravt.model import save_model

log = logging.getLogger("paravt")

METRICS = "metrics.jsonl"
STATE = "state.pt"
MOST_NON_FINITE = 3  # steps in a row


class NonFiniteLoss(RuntimeError):
    """The loss stayed NaN or infinite; the message names the step and its samples."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run: steps done, the file of its metrics, and what was counted on the way."""

    steps: int
    metrics_path: Path
    counts: dict[str, int]


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


def write_model_folder(
    model: Qwen3VLForConditionalGeneration, source: str | Path, target: str | Path
) -> None:
    """A whole model folder at `target`, or none: weights, with the tokenizer files of `source`."""
    publish_model(target, lambda folder: save_model(model, source, folder))


def publish_model(target: str | Path, write: Callable[[Path], None]) -> None:
    """Make `target` appear at once as `write(folder)` fills it. Raises CheckpointError if the disk does not
    take it; what was at `target` before then stays.
    """
    try:
        checkpoints.publish(Path(target), write)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {checkpoints.reason(error)}") from error
    except SafetensorError as error:
        # The library's own words hold the system's, as in "(os error 28)".
        match = re.search(r"os error (\d+)", str(error))
        why = checkpoints.reason(OSError(int(match[1]), os.strerror(int(match[1])))) if match else error
        raise CheckpointError(f"cannot write {target}: {why}") from error


class TrainingRun:
    """The state of one training, from its scratch folder if it was stopped before.

    `identity` is everything that the run depends on, as JSON data; a checkpoint of another identity is
    refused with a CheckpointError. One process trains; several raise ValueError.
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
    ) -> None:
        self.steps, self.save_every, self.keep = steps, save_every, keep
        self.config = optimiser
        self.scratch = Path(scratch_dir)
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.fingerprint = stable_hash(json.dumps(identity, sort_keys=True, default=str))
        self.done = 0
        self.non_finite = self.non_finite_in_a_row = 0
        self.counts: dict[str, int] = {}
        self.lines: list[str] = []

        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ValueError("training runs in one process; start it without accelerate launch")
        freeze_vision(model, frozen_vision)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        adam = torch.optim.AdamW(
            self.trained,
            lr=optimiser.learning_rate,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
        )
        self.model, self.optimiser = self.accelerator.prepare(model, adam)
        self._resume()

    @property
    def metrics_path(self) -> Path:
        return self.scratch / METRICS

    @property
    def remaining(self) -> range:
        """The steps that are still to do."""
        return range(self.done, self.steps)

    def backward(self, loss: torch.Tensor) -> float:
        """Add the gradient of one micro-batch's part of the loss; the value of that part."""
        self.accelerator.backward(loss)
        return loss.item()

    def update(self, step: int, loss: float, sample_ids: Sequence[str]) -> dict[str, float]:
        """One optimiser step on the gradients gathered; metrics.

        A loss or gradient that is not finite changes no weight and is counted; the third in a row raises
        NonFiniteLoss.
        """
        rate = learning_rate(self.config, step, self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        norm = float(self.accelerator.clip_grad_norm_(self.trained, self.config.clip_norm))
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

    def count(self, reason: str, by: int = 1) -> None:
        """Count something that was left out, by its reason; the counts survive a resume."""
        self.counts[reason] = self.counts.get(reason, 0) + by

    def finish_step(self, step: int, values: Mapping[str, float | None]) -> dict[str, float]:
        """Write the step's line, save if due; the finite values. `step` counts from 0, the line from 1."""
        kept = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
        line = {"step": step + 1} | {key: round(float(value), 9) for key, value in kept.items()}
        self.lines.append(json.dumps(line))
        try:
            with open(self.metrics_path, "a", encoding="utf-8") as file:
                file.write(self.lines[-1] + "\n")
        except OSError as error:
            why = checkpoints.reason(error)
            raise CheckpointError(f"cannot write {self.metrics_path}: {why}") from error
        self.done = step + 1
        if self.done % self.save_every == 0 or self.done == self.steps:
            checkpoints.save(self.scratch, self.done, self._write, self.keep)
        return kept

    def result(self) -> TrainResult:
        """The finished run. Raises RuntimeError if steps are left."""
        if self.done != self.steps:
            raise RuntimeError(f"the run ended after {self.done} of {self.steps} steps")
        return TrainResult(self.done, self.metrics_path, dict(self.counts))

    def _write(self, folder: Path) -> None:
        state = {
            "fingerprint": self.fingerprint,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": checkpoints.random_state(),
            "non_finite": (self.non_finite, self.non_finite_in_a_row),
            "counts": self.counts,
        }
        checkpoints.save_tensors(folder / STATE, state)
        (folder / METRICS).write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")

    def _resume(self) -> None:
        found = checkpoints.latest(self.scratch)
        if found:
            state = checkpoints.load_tensors(found.folder / STATE)
            if state["fingerprint"] != self.fingerprint or found.step > self.steps:
                raise CheckpointError(
                    f"{found.folder} belongs to a run with other parameters or data; remove {self.scratch} "
                    "to start anew, or give another folder"
                )
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            checkpoints.restore_random_state(state["random"])
            self.non_finite, self.non_finite_in_a_row = state["non_finite"]
            self.counts = state["counts"]
            self.lines = (found.folder / METRICS).read_text(encoding="utf-8").splitlines()
            self.done = found.step
            log.info("resuming after step %d of %d from %s", self.done, self.steps, found.folder)
        self.metrics_path.write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")
