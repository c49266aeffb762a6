"""Qwen3-VL-8B on the meta device: names, shapes, counts, and what is frozen."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from paravt.architecture import QWEN3_VL_8B, Architecture
from paravt.config import LoRAConfig
from paravt.lora import add_adapters
from paravt.training import freeze_vision
from tests.tiny import tiny_config, tiny_tokenizer


def on_meta(config: Qwen3VLConfig) -> Qwen3VLForConditionalGeneration:
    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration(config)


@pytest.fixture(scope="module")
def model() -> Qwen3VLForConditionalGeneration:
    return on_meta(Qwen3VLConfig(**QWEN3_VL_8B.config()))


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of each weight of the released checkpoint, written out from its configuration."""
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (151_936, 4096)}
    text, vision = "model.language_model", "model.visual"
    shapes |= {f"{text}.embed_tokens.weight": (151_936, 4096), f"{text}.norm.weight": (4096,)}
    for layer in range(36):
        at = f"{text}.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (4096, 4096) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (1024, 4096) for name in "kv"}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (12_288, 4096) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (4096, 12_288)
        shapes |= {f"{at}.{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")}
    shapes |= {
        f"{vision}.patch_embed.proj.weight": (1152, 3, 2, 16, 16),
        f"{vision}.patch_embed.proj.bias": (1152,),
        f"{vision}.pos_embed.weight": (2304, 1152),
    }
    linears = {"attn.qkv": (3456, 1152), "attn.proj": (1152, 1152)}
    linears |= {"mlp.linear_fc1": (4304, 1152), "mlp.linear_fc2": (1152, 4304)}
    for block in range(27):
        at = f"{vision}.blocks.{block}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{at}.{name}.bias": shape[:1] for name, shape in linears.items()}
        shapes |= {
            f"{at}.{norm}.{kind}": (1152,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")
        }
    mergers = {f"{vision}.merger": 1152}
    mergers |= {f"{vision}.deepstack_merger_list.{tap}": 4608 for tap in range(3)}
    for at, normed in mergers.items():
        shapes |= {f"{at}.norm.{kind}": (normed,) for kind in ("weight", "bias")}
        shapes |= {f"{at}.linear_fc1.weight": (4608, 4608), f"{at}.linear_fc1.bias": (4608,)}
        shapes |= {f"{at}.linear_fc2.weight": (4096, 4608), f"{at}.linear_fc2.bias": (4096,)}
    return shapes


def test_names_and_shapes_are_those_of_the_released_checkpoint(model):
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == published_shapes()
    assert model.config.text_config.rope_parameters["rope_theta"] == 5_000_000
    assert model.config.text_config.rope_parameters["mrope_section"] == [24, 20, 20]
    assert model.config.vision_config.deepstack_visual_indexes == [8, 16, 24]


def test_counts_are_the_published_ones_and_the_plans(model):
    vision = sum(weight.numel() for weight in model.model.visual.parameters())
    total = sum(weight.numel() for weight in model.parameters())
    assert (vision, total) == (576_388_336, 8_767_123_696)
    assert (QWEN3_VL_8B.vision_parameters, QWEN3_VL_8B.parameters) == (vision, total)
    assert QWEN3_VL_8B.text_parameters == 8_190_735_360
    layer = model.model.language_model.layers[0]
    assert QWEN3_VL_8B.layer_parameters == sum(weight.numel() for weight in layer.parameters())


def test_the_frozen_set_is_the_vision_tower_with_its_mergers(model):
    freeze_vision(model, True)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name in published_shapes() if name.startswith("model.visual.")}
    assert any("merger" in name for name in frozen) and any("deepstack" in name for name in frozen)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == QWEN3_VL_8B.text_parameters
    freeze_vision(model, False)
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize(
    "sizes", [QWEN3_VL_8B.shallow(2, 3), QWEN3_VL_8B.shallow(1, 1), Architecture(hidden=2048)]
)
def test_other_sizes_count_right_too(sizes):
    model = on_meta(Qwen3VLConfig(**sizes.config()))
    assert sum(weight.numel() for weight in model.parameters()) == sizes.parameters


def test_adapters_count_right():
    sizes = QWEN3_VL_8B.shallow(2, 1)
    model = on_meta(Qwen3VLConfig(**sizes.config()))
    add_adapters(model, LoRAConfig(rank=64), seed=1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == sizes.adapter_parameters(64)


def test_the_tiny_model_has_the_same_names_but_for_its_depth():
    tiny = {name for name, _ in on_meta(tiny_config(tiny_tokenizer())).named_parameters()}
    assert tiny <= set(published_shapes())
