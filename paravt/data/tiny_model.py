"""A small Qwen3-VL from nothing: its tokenizer, its configuration, its folder.

The architecture is transformers' own Qwen3-VL; only the sizes are small. A 32 x 32 frame is 2 x 2 patches and
becomes one token. The tokenizer is a byte-level BPE learned from the needle world's texts; it treats as
single tokens exactly the tags that Qwen's own does, so `<answer>` and `<tool_code>` are ordinary text.
"""

from __future__ import annotations

from collections.abc import Iterable
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

# In Qwen's order. The second group has special=False there: it survives skip_special_tokens.
SPECIAL_TAGS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Qwen's splitting, but a time such as 12.3 stays together so that copying one is copying one token.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}\.\p{N}|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if 'image' in item or 'image_url' in item or item.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in item -%}{{- item.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocabulary` tokens, Qwen's tags included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = vocabulary - len(SPECIAL_TAGS) - len(PLAIN_TAGS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in SPECIAL_TAGS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in PLAIN_TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(tokenizer: PreTrainedTokenizerFast, hidden: int = 128, layers: int = 4) -> Qwen3VLConfig:
    """Qwen3-VL with few layers: `hidden` wide text, a two-block vision tower, tied embeddings."""
    ids = dict(zip(SPECIAL_TAGS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TAGS)), strict=True))
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": hidden // 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def write_companions(folder: Path, tokenizer: PreTrainedTokenizerFast, max_pixels: int) -> None:
    """Tokenizer and processor files, as AutoProcessor and vLLM read them."""
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 1024, "longest_edge": max_pixels}
    shared = {
        "size": size,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = shared | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    }
    video = shared | {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    files = {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": video,
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    GenerationConfig(eos_token_id=end, pad_token_id=end[1], do_sample=False).save_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """The tiny architecture with fresh weights, in float32."""
    return Qwen3VLForConditionalGeneration(tiny_config(tokenizer)).float()
