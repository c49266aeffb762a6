"""A random Qwen3-VL of a few ten thousand weights, with a Qwen-like tokenizer, in a folder.

The architecture, the file layout and the control tokens are those of the real model; the weights are noise.
`tiny_folder()` builds it once per test process.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
import tempfile

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from paravt.chat import ChatEncoder
from paravt.config import VisualConfig
from paravt.conversation import Conversation
from paravt.model import load_encoder, load_model

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VISUAL = VisualConfig(min_pixels=1024, max_pixels=4096)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "system user assistant You answer questions about a video. Put the answer in <answer></answer>.",
    "<12.3 seconds><4.0 seconds> Which shape shows in the red part? A. circle B. square C. cross",
    '{"name": "crop_video", "arguments": {"start_time": 4.0, "end_time": 12.5, "num_frames": 8}}',
    "Segment 4.0 to 12.5 seconds. Describe in order what happens, with times. A red circle at 8.0.",
)


def tiny_tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's control tokens; the think and tool tags are single, but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = vocabulary - len(SPECIAL) - len(PLAIN)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Text hidden 32 and 2 layers, vision hidden 32 and 2 blocks (one of them feeds the text layers)."""
    token = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def build_tiny(folder: str | Path, seed: int = 0, spread: float = 0.3) -> Path:
    """Write a whole model folder. `spread` scales the noise: logits are neither flat nor one-hot."""
    folder = Path(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = Qwen3VLForConditionalGeneration(tiny_config(tokenizer))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.save_pretrained(folder)
    return folder


@lru_cache(maxsize=1)
def tiny_folder() -> Path:
    """The folder of the shared random model; removed when the process ends."""
    holder = tempfile.TemporaryDirectory(prefix="paravt-tiny-")
    _HOLDERS.append(holder)
    return build_tiny(Path(holder.name) / "model")


_HOLDERS: list[tempfile.TemporaryDirectory] = []


@lru_cache(maxsize=1)
def tiny_model() -> Qwen3VLForConditionalGeneration:
    """The shared model. A test that changes weights loads its own from `tiny_folder()`."""
    return load_model(tiny_folder())


@lru_cache(maxsize=1)
def tiny_encoder() -> ChatEncoder:
    return load_encoder(tiny_folder(), VISUAL)


class TinyFrames:
    """Frames of noise with the attributes of `paravt.video.Frames`."""

    def __init__(self, times_s: list[float], seed: int = 0, size: tuple[int, int] = (32, 32)) -> None:
        generator = np.random.default_rng(seed)
        self.times_s = np.asarray(times_s, dtype=np.float64)
        self.images = generator.integers(0, 256, (len(times_s), *size, 3), dtype=np.uint8)
        self.window_s = (float(self.times_s[0]), float(self.times_s[-1])) if times_s else (0.0, 0.0)
        self.clamped = False


def tiny_conversation(
    times_s: list[float], text: str = "Which shape?", seed: int = 0, size: tuple[int, int] = (32, 32)
) -> Conversation:
    """A first user turn with frames of noise, ready for the assistant."""
    frames = TinyFrames(times_s, seed, size) if times_s else None
    return tiny_encoder().start("You answer.", frames, "noise.mp4", text, "<think>\n")
