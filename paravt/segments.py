"""Attention within each of the samples that share a row, and not across them.

A row of n samples is cut where they end; each part attends causally to itself. That is what a block-diagonal
mask says, at the cost of the blocks alone: sum of n_i^2 instead of (sum of n_i)^2, and with no mask to keep.
flash attention does the same inside its kernel; this is for machines without it.

`use_segments(model)` switches the language model over for good; the vision tower keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "segments"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Sequence[int] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Queries, keys and values [rows, heads, T, size] to [rows, T, heads, size]; `segments` add up to T."""
    lengths = list(segments or [query.shape[2]])
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    seen = [
        sdpa_attention_forward(module, q, k, v, None, dropout, scaling, is_causal=True)[0]
        for q, k, v in parts
    ]
    return torch.cat(seen, dim=1), None


def no_mask(*_: object, **__: object) -> None:
    """Right padding is never looked at, and the segments need no mask."""


def use_segments(model: Qwen3VLForConditionalGeneration) -> None:
    """Attend by segments wherever a batch names them; causally, padding on the right, elsewhere."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)
    model.set_attn_implementation({"text_config": NAME})
