"""Supervised fine-tuning: the cold start that teaches the format.

    loss = - sum over the teacher's tokens of log p(token) / number of the teacher's tokens in the step

The denominator counts the whole step, so the loss does not depend on how the step is cut into micro-batches.
Temperature is 1. Which traces a step visits follows from (seed, step); each epoch has an order of its own.
A trace whose video cannot be read is left out and counted by its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import logging
from pathlib import Path
import time

from tqdm import tqdm
from transformers import Qwen3VLForConditionalGeneration

from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig, Params, SFTConfig
from paravt.conversation import Conversation
from paravt.data.schema import TraceRow
from paravt.hashing import items_of_step
from paravt.model import collate, token_scores
from paravt.reporter import Reporter
from paravt.sft.data import TraceSource
from paravt.training import TrainingRun, TrainResult, micro_batches
from paravt.video import VideoError

log = logging.getLogger("paravt")
KEEP_CHECKPOINTS = 2


@dataclass(frozen=True)
class SFTSetup:
    """What an SFT run depends on beside model and traces."""

    seed: int
    episode: EpisodeConfig
    sft: SFTConfig

    @classmethod
    def of(cls, params: Params) -> SFTSetup:
        return cls(params.seed, params.episode, params.sft)


def train(
    model: Qwen3VLForConditionalGeneration,
    encoder: ChatEncoder,
    traces: Sequence[TraceRow],
    setup: SFTSetup,
    reporter: Reporter,
    scratch_dir: str | Path,
    video_root: str | Path = ".",
) -> TrainResult:
    """Train `model` in place for `setup.sft.steps` steps, from the last checkpoint in `scratch_dir` if any.

    Raises CheckpointError (disk, or a checkpoint of another run), NonFiniteLoss, ValueError (no traces).
    """
    config = setup.sft
    ids = [trace.id for trace in traces]
    run = TrainingRun(
        model,
        config.optimiser,
        steps=config.steps,
        save_every=config.save_every,
        keep=KEEP_CHECKPOINTS,
        frozen_vision=config.freeze_vision,
        scratch_dir=scratch_dir,
        identity=[
            setup.seed,
            setup.episode.model_dump(),
            encoder.visual.model_dump(),
            config.model_dump(),
            ids,
        ],
    )
    source = TraceSource(encoder, traces, setup.episode, video_root)
    with tqdm(total=config.steps, initial=run.done, desc="sft", unit="step", disable=None) as bar:
        for step in run.remaining:
            started = time.monotonic()
            items = items_of_step(setup.seed, step, config.batch_size, ids)
            conversations = _readable(run, source, [item.index for item in items])
            values = _step(run, step, conversations, config, [ids[item.index] for item in items])
            kept = run.finish_step(step, {"epoch": items[-1].epoch} | values)
            seconds = time.monotonic() - started
            speed = {"time/step_s": seconds, "time/tokens_per_s": values["tokens"] / seconds}
            reporter.metrics(kept | speed, step + 1)
            reporter.progress(step + 1, config.steps, f"loss {values['loss']:.3f}")
            bar.set_postfix(loss=f"{values['loss']:.3f}")
            bar.update()
    return run.result()


def _readable(run: TrainingRun, source: TraceSource, indices: Sequence[int]) -> list[Conversation]:
    """The conversations of a step. Raises the last VideoError if none can be read."""
    conversations, fault = [], None
    for index in indices:
        try:
            conversations.append(source.conversation(index))
        except VideoError as error:
            fault = error
            run.count(f"video {error.reason}")
            log.warning("trace %s is left out: %s", source.traces[index].id, error)
    if fault and not conversations:
        raise fault
    return conversations


def _step(
    run: TrainingRun, step: int, conversations: list[Conversation], config: SFTConfig, ids: Sequence[str]
) -> dict[str, float]:
    """One update; loss, token accuracy, and what was trained on."""
    tokens = sum(conversation.sampled_count for conversation in conversations)
    loss = hits = 0.0
    for positions in micro_batches([len(c.ids) for c in conversations], config.micro_batch_tokens):
        batch = collate([conversations[i] for i in positions]).to(run.accelerator.device)
        scores = token_scores(run.model, batch, temperature=1.0)
        loss += run.backward(-scores.logprobs.sum() / tokens)
        hits += scores.top.sum().item()
    return run.update(step, loss, ids) | {
        "token_accuracy": hits / tokens,
        "tokens": tokens,
        "traces_left_out": sum(run.counts.values()),
    }
