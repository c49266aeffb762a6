"""Supervised fine-tuning: the cold start that teaches the format.

    loss = - sum over the teacher's tokens of log p(token) / number of the teacher's tokens in the step

The denominator counts the whole step, so the loss does not depend on how the step is cut into micro-batches.
Temperature is 1. Which traces a step visits follows from (seed, step); each epoch has an order of its own.
A trace whose video cannot be read is left out and counted by its reason; so is, with `packing`, one that is
longer than a row.
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
from paravt.config import EpisodeConfig, Params, SFTConfig, TrainConfig
from paravt.conversation import Conversation
from paravt.data.schema import TraceRow
from paravt.hashing import items_of_step
from paravt.model import collate, pack
from paravt.reporter import Reporter
from paravt.segments import use_segments
from paravt.sft.data import TraceSource
from paravt.sft.packing import best_fit
from paravt.times import TimeError
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
    train: TrainConfig = TrainConfig()

    @classmethod
    def of(cls, params: Params) -> SFTSetup:
        return cls(params.seed, params.episode, params.sft, params.train)


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
    if config.packing and setup.train.attention == "sdpa":
        use_segments(model)
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
            config.model_dump(exclude={"save_every"}),
            setup.train.identity(),
            [trace.to_json() for trace in traces],
        ],
        train=setup.train,
    )
    source = TraceSource(encoder, traces, setup.episode, video_root)

    def own(step: int) -> list[int]:
        items = items_of_step(setup.seed, step, config.batch_size, ids)
        return [item.index for item in run.processes.share(items)]

    hidden = None if run.is_first else True
    with (
        source,
        tqdm(total=config.steps, initial=run.done, desc="sft", unit="step", disable=hidden) as bar,
    ):
        for step in run.remaining:
            started = time.monotonic()
            items = items_of_step(setup.seed, step, config.batch_size, ids)
            source.prefetch(own(step))
            conversations, left_out = _readable(run, source, own(step), config)
            if step + 1 < config.steps:
                source.prefetch(own(step + 1))
            values = train_step(run, step, conversations, config, [ids[item.index] for item in items])
            kept = run.finish_step(step, {"epoch": items[-1].epoch, "traces_left_out": left_out} | values)
            if not run.is_first:
                continue
            seconds = time.monotonic() - started
            speed = {"time/step_s": seconds, "time/tokens_per_s": values["tokens"] / seconds}
            reporter.metrics(kept | speed, step + 1)
            reporter.progress(step + 1, config.steps, f"loss {values['loss']:.3f}")
            bar.set_postfix(loss=f"{values['loss']:.3f}")
            bar.update()
    return run.result()


def _readable(
    run: TrainingRun, source: TraceSource, indices: Sequence[int], config: SFTConfig
) -> tuple[list[Conversation], int]:
    """This process's conversations of a step, and how many traces all processes leave out, which they count.

    Raises the last VideoError or TimeError if none of the step can be read, ValueError if all are longer
    than a row.
    """
    conversations, reasons, fault = [], [], None
    for index in indices:
        try:
            conversation = source.conversation(index)
        except (VideoError, TimeError) as error:
            fault = error
            reasons.append(f"video {error.reason}" if isinstance(error, VideoError) else "window outside")
            log.warning("trace %s is left out: %s", source.traces[index].id, error)
            continue
        if config.packing and len(conversation.ids) > config.micro_batch_tokens:
            reasons.append("longer than a row")
        else:
            conversations.append(conversation)
    parts = run.processes.gather((len(conversations), reasons, fault))
    left_out = [reason for _, part, _ in parts for reason in part]
    for reason in left_out:
        run.count(reason)
    if not any(kept for kept, _, _ in parts):
        faults = [fault for _, _, fault in parts if fault]
        raise (
            faults[-1]
            if faults
            else ValueError(
                f"each sample of a step is longer than sft.micro_batch_tokens {config.micro_batch_tokens}; "
                "write more there, or fewer frames in budget.choices"
            )
        )
    return conversations, len(left_out)


def train_step(
    run: TrainingRun, step: int, conversations: list[Conversation], config: SFTConfig, ids: Sequence[str]
) -> dict[str, float]:
    """One update; loss, token accuracy, and what was trained on."""
    total = run.processes.total
    tokens = total(sum(conversation.sampled_count for conversation in conversations))
    lengths = [len(conversation.ids) for conversation in conversations]
    cut, join = (best_fit, pack) if config.packing else (micro_batches, collate)
    loss = hits = 0.0
    for positions in run.passes(cut(lengths, config.micro_batch_tokens)):
        batch = join([conversations[i] for i in positions]) if positions else None
        scores = run.scores(batch, temperature=1.0)
        loss += run.backward(-scores.logprobs.sum() / tokens)
        hits += scores.top.sum().item()
    return run.update(step, total(loss), ids) | {
        "token_accuracy": total(hits) / tokens,
        "tokens": tokens,
    }
