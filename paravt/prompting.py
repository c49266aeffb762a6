"""From a question and its frames to the first tokens: one place for agent, SFT and evaluation.

The main agent reads the system prompt of its mode, the overview frames, the question. A sub-agent reads the
frames of its window and a general instruction: no system prompt, no forced think. What is trained on is
built by the very functions that sampling uses.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig
from paravt.conversation import Conversation
from paravt.protocol.prompts import THINK_PREFIX, question_text, subagent_instruction, system_prompt
from paravt.rollout import Sample

if TYPE_CHECKING:
    from paravt.protocol.upstream import Upstream
    from paravt.video import Frames


def main_prefix(config: EpisodeConfig) -> str:
    """What stands before each sampled turn of the main agent: `<think>` and a newline, or nothing.

    Mode `direct` asks for an answer at once, so no think is forced on it.
    """
    return THINK_PREFIX if config.force_think and config.mode != "direct" else ""


def main_prompt(
    encoder: ChatEncoder,
    sample: Sample,
    frames: Frames,
    config: EpisodeConfig,
    upstream: Upstream | None = None,
) -> Conversation:
    """The main agent's conversation up to its first sampled token; `upstream` has the words of a baseline."""
    if upstream is not None:
        system, text = upstream.prompt(sample)
        if schema := upstream.texts.get("schema"):
            system = encoder.tools_block(json.loads(schema))
        return encoder.start(system, frames, sample.video, text, main_prefix(config))
    return encoder.start(
        system_prompt(config.mode, config.calls_per_turn),
        frames,
        sample.video,
        question_text(sample, config.mode),
        main_prefix(config),
    )


def subagent_prompt(
    encoder: ChatEncoder,
    sample: Sample,
    frames: Frames,
    window_s: tuple[float, float],
    config: EpisodeConfig,
) -> Conversation:
    """A sub-agent's conversation up to its first sampled token; with the question only if so configured."""
    question = sample.question if config.subagent.sees_question else None
    return encoder.start(None, frames, sample.video, subagent_instruction(window_s, question))
