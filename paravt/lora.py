"""Adapters of low rank (LoRA, by peft) on the linear layers of the language model.

    y = W x + (alpha / rank) B A x        A random, B zero: the first pass is that of the model alone

Only A and B are trained, in float32. The frozen start that a KL needs is the same model with its adapters
off, so no second copy is held. A model folder that is written holds W + (alpha / rank) B A and no adapters:
it loads like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
import torch
from torch import nn

from paravt.config import LoRAConfig

LAYERS = r"model\.language_model\.layers\..*\.(q|k|v|o|gate|up|down)_proj"
ADAPTER = "default"


def add_adapters(model: nn.Module, config: LoRAConfig, seed: int) -> None:
    """Put adapters into `model` and freeze all else. The draw of A depends on `seed` alone."""
    chosen = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=LAYERS)
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        inject_adapter_in_model(chosen, model, ADAPTER)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad and weight.dtype == torch.bfloat16:
            weight.data = weight.data.float()


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model is the one that training started from."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights by the names of a model without adapters, these added in; dtypes stay."""
    weights = model.state_dict()
    merged = {
        name.replace(".base_layer.", "."): weight for name, weight in weights.items() if ".lora_" not in name
    }
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                base = merged[f"{name}.weight"]
                wide = torch.float64 if base.dtype == torch.float64 else torch.float32
                delta = layer.get_delta_weight(ADAPTER)
                merged[f"{name}.weight"] = (base.to(wide) + delta.to(wide)).to(base.dtype)
    return merged
