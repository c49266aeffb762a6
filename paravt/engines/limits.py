"""What a server must be able to hold, computed from the configuration; what a model folder says of itself.

    images    the most frames of one prompt: overview frames (and crop frames, where they go back as images)
    context   frames + question + turns + reports, in tokens, within the model's own context

A prompt that exceeds them is refused before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
import hashlib
import json
from pathlib import Path

from paravt.chat import PATCH
from paravt.config import EpisodeConfig, VisualConfig
from paravt.conversation import MERGE, UNSAMPLED_FIELDS
from paravt.engines.base import EngineError

FRAME_TEXT = 24  # tokens of `<1234.5 seconds>` with its vision-start and vision-end, at most
PROMPT_TEXT = 4096  # system prompt, question, options
TURN_TEXT = 64  # role headers, tags and notes around a turn or a report
CHANGES_NOTHING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of config.json


@dataclass(frozen=True)
class PromptLimits:
    """The most images of one prompt, and the most tokens of a prompt with what is written after it."""

    images: int
    context: int

    @classmethod
    def of(cls, episode: EpisodeConfig, visual: VisualConfig, frames: int) -> PromptLimits:
        """For episodes with up to `frames` overview frames."""
        calls = episode.calls_per_turn
        looks = episode.max_turns * calls
        inline = episode.dispatch == "frames"
        images = frames + looks * visual.crop_max_frames * inline
        report = 0 if inline else episode.subagent.max_new_tokens
        frame_tokens = -(-visual.max_pixels // (PATCH * MERGE) ** 2) + FRAME_TEXT
        turns = (episode.max_turns + 1) * (episode.max_new_tokens + TURN_TEXT)
        main = PROMPT_TEXT + images * frame_tokens + turns + looks * (report + TURN_TEXT)
        subagent = PROMPT_TEXT + visual.crop_max_frames * frame_tokens + episode.subagent.max_new_tokens
        return cls(max(images, visual.crop_max_frames), max(main, subagent))


@dataclass(frozen=True)
class ModelFacts:
    """What config.json and tokenizer.json say. `fingerprint` is the same for all weights of one architecture
    and vocabulary.
    """

    image_pad_id: int
    vision_start_id: int
    vision_end_id: int
    unsampled_ids: tuple[int, ...]
    vocabulary: int
    context: int
    fingerprint: str

    @classmethod
    def of(cls, folder: str | Path) -> ModelFacts:
        """Read a model folder. Raises EngineError naming what it lacks."""
        try:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            tokenizer = (Path(folder) / "tokenizer.json").read_bytes()
            text = config["text_config"]
            control = {config[name] for name in UNSAMPLED_FIELDS if config[name] < text["vocab_size"]}
            digest = hashlib.sha256(json.dumps(_decisive(config), sort_keys=True).encode() + tokenizer)
            return cls(
                image_pad_id=config["image_token_id"],
                vision_start_id=config["vision_start_token_id"],
                vision_end_id=config["vision_end_token_id"],
                unsampled_ids=tuple(sorted(control)),
                vocabulary=text["vocab_size"],
                context=text["max_position_embeddings"],
                fingerprint=digest.hexdigest()[:12],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{folder} is not a complete Qwen3-VL model folder ({error})") from error


def _decisive(config: dict) -> dict:
    """The configuration without what saving a model changes, at any depth."""
    return {
        key: _decisive(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in CHANGES_NOTHING
    }
