"""Qwen3-VL-8B as numbers: what its published configuration says, and what follows from it.

    text      embedding + head + layers x (q, k, v, o, their norms, gate, up, down, two norms) + norm
    vision    patch embedding + position table + blocks + merger + deepstack mergers

A plan of memory needs no weights and no torch. `config()` gives the same architecture to transformers,
whose own defaults are those of another model; a test counts its parameters on the meta device against the
sums here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Sizes of a Qwen3-VL; the defaults are those of Qwen3-VL-8B-Instruct."""

    hidden: int = 4096
    intermediate: int = 12_288
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151_936
    vision_hidden: int = 1152
    vision_intermediate: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    vision_positions: int = 2304
    taps: tuple[int, ...] = (8, 16, 24)
    patch: int = 16
    temporal: int = 2
    merge: int = 2

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_size
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the token embedding; the head, which is not tied to it, has as many."""
        return self.vocabulary * self.hidden

    @property
    def text_parameters(self) -> int:
        return 2 * self.embedding_parameters + self.layers * self.layer_parameters + self.hidden

    @property
    def vision_parameters(self) -> int:
        """Of the vision tower with its mergers: what is frozen."""
        size, wide = self.vision_hidden, self.vision_intermediate
        patches = 3 * self.temporal * self.patch**2 * size + size
        block = (3 * size * size + 3 * size) + (size * size + size)  # qkv, projection
        block += (size * wide + wide) + (wide * size + size) + 4 * size  # both layers of the MLP, two norms
        merged = size * self.merge**2
        projections = (merged * merged + merged) + (merged * self.hidden + self.hidden)
        mergers = (projections + 2 * size) + len(self.taps) * (projections + 2 * merged)
        return patches + self.vision_positions * size + self.vision_depth * block + mergers

    @property
    def parameters(self) -> int:
        return self.text_parameters + self.vision_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the key and value cache, in 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2

    def tokens_per_frame(self, max_pixels: int) -> int:
        """Most tokens of a frame of up to `max_pixels`."""
        return max(1, max_pixels // (self.patch * self.merge) ** 2)

    def adapter_parameters(self, rank: int) -> int:
        """Of adapters on the seven linear layers of each decoder layer."""
        heads, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes = [(self.hidden, heads), (self.hidden, kv), (self.hidden, kv), (heads, self.hidden)]
        shapes += [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in shapes)

    def shallow(self, layers: int, vision_depth: int) -> Architecture:
        """The same widths with fewer layers; the taps move to the blocks that are left."""
        taps = tuple(min(vision_depth - 1, vision_depth * (n + 1) // 4) for n in range(len(self.taps)))
        return replace(self, layers=layers, vision_depth=vision_depth, taps=tuple(sorted(set(taps))))

    def config(self) -> dict[str, Any]:
        """The published config.json, as keyword arguments of transformers' Qwen3VLConfig."""
        return {
            "text_config": {
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_size,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "attention_bias": False,
                "max_position_embeddings": 262_144,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5_000_000,
                    "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True,
                },
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden,
                "intermediate_size": self.vision_intermediate,
                "num_heads": self.vision_heads,
                "out_hidden_size": self.hidden,
                "num_position_embeddings": self.vision_positions,
                "patch_size": self.patch,
                "temporal_patch_size": self.temporal,
                "spatial_merge_size": self.merge,
                "deepstack_visual_indexes": list(self.taps),
                "hidden_act": "gelu_pytorch_tanh",
            },
            "image_token_id": 151_655,
            "video_token_id": 151_656,
            "vision_start_token_id": 151_652,
            "vision_end_token_id": 151_653,
            "tie_word_embeddings": False,
        }


QWEN3_VL_8B = Architecture()
