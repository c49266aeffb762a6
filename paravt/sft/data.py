"""From a teacher's trace to a conversation to learn from.

The prompt comes from `paravt.prompting` and the frames from `paravt.video`: the very functions that episodes
use. The loss mask is 1 on the teacher's tokens, the end-of-turn token included, and 0 on prompts, forced
prefixes and tool results.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig
from paravt.conversation import Conversation
from paravt.data.schema import TraceRow
from paravt.footage import locate
from paravt.prompting import main_prefix, main_prompt, subagent_prompt
from paravt.protocol.prompts import THINK_PREFIX
from paravt.video import Frames, open_video

CACHE_BYTES = 2**30
READERS = 4  # videos read at the same time


def trace_conversation(
    encoder: ChatEncoder, trace: TraceRow, frames: Frames, config: EpisodeConfig
) -> Conversation:
    """The conversation of one trace on frames [n, H, W, 3]: the overview, or the sub-agent's crop."""
    if trace.kind == "subagent":
        conversation = subagent_prompt(encoder, trace.sample, frames, trace.window_s, config)
        encoder.add_gold(conversation, trace.turns[0].text)
        return conversation
    prefix = main_prefix(config)
    conversation = main_prompt(encoder, trace.sample, frames, config)
    for turn in trace.turns:
        if turn.role == "assistant":
            encoder.add_gold(conversation, gold_text(turn.text, config))
        else:
            encoder.add_tool_results(conversation, turn.results, trace.sample.video, prefix)
    return conversation


def gold_text(text: str, config: EpisodeConfig) -> str:
    """What is left to write of a main turn: all of it, less the prefix that is forced.

    Traces may be written with or without their opening `<think>`, and with or without a newline after it.
    """
    if config.mode == "direct":
        return text
    body = text.removeprefix("<think>").removeprefix("\n") if text.startswith("<think>") else text
    return (THINK_PREFIX + body).removeprefix(main_prefix(config))


def read_frames(encoder: ChatEncoder, trace: TraceRow, video_root: str | Path = ".") -> Frames:
    """The frames that a trace was written on: at most its budget, or as many as a crop may have.

    Raises VideoError if the video cannot be read, TimeError if nothing of it lies in the trace's window,
    RuntimeError if the reader gives more frames than the trace allows.
    """
    visual = encoder.visual
    path = locate(trace.sample.video, video_root)
    with open_video(path, timeout_s=visual.read_timeout_s) as video:
        if trace.kind == "main":
            most, frames = trace.frame_budget, video.sample(trace.frame_budget)
        else:
            most = visual.crop_max_frames
            frames = video.crop(*trace.window_s, visual.crop_fps, most)
    if len(frames.times_s) > most:
        raise RuntimeError(f"trace {trace.id}: {len(frames.times_s)} frames were decoded, {most} are allowed")
    return frames


@dataclass
class TraceSource:
    """Conversations of traces by position, decoded when first asked for.

    Those that fit into `cache_bytes` of pixels are kept; the rest is decoded again in each epoch.
    Relative video paths start at `video_root`. Inside `with`, `prefetch` reads ahead of the training.
    """

    encoder: ChatEncoder
    traces: Sequence[TraceRow]
    config: EpisodeConfig
    video_root: str | Path = "."
    cache_bytes: int = CACHE_BYTES
    _kept: dict[int, Conversation] = field(default_factory=dict, repr=False)
    _coming: dict[int, Future[Conversation]] = field(default_factory=dict, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)

    def __enter__(self) -> TraceSource:
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="traces")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to decode what will be asked for next."""
        for index in indices:
            if index not in self._kept and index not in self._coming:
                self._coming[index] = self._pool.submit(self._decode, index)

    def conversation(self, index: int) -> Conversation:
        """The conversation of `traces[index]`. Raises VideoError if its video cannot be read."""
        if index in self._kept:
            return self._kept[index]
        coming = self._coming.pop(index, None)
        made = coming.result() if coming else self._decode(index)
        size = sum(visual.image.nbytes for visual in made.visuals)
        if size <= self.cache_bytes:
            self.cache_bytes -= size
            self._kept[index] = made
        return made

    def _decode(self, index: int) -> Conversation:
        trace = self.traces[index]
        frames = read_frames(self.encoder, trace, self.video_root)
        return trace_conversation(self.encoder, trace, frames, self.config)
