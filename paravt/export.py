"""A trained model as a folder that transformers and vLLM load: weights whole, adapters merged, or no folder.

All processes of a training call these functions; where weights are split over them each has a part to give,
and the first one writes.
"""

from __future__ import annotations

from collections.abc import Callable
import os
from pathlib import Path
import re

from safetensors import SafetensorError
import torch
from transformers import Qwen3VLForConditionalGeneration

from paravt import checkpoints
from paravt.checkpoints import CheckpointError
from paravt.lora import has_adapters, merged_weights
from paravt.model import save_model
from paravt.parallel import is_first, tell
from paravt.state import is_split, whole_weights


def export_weights(
    model: Qwen3VLForConditionalGeneration, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor] | None:
    """Weights to write, adapters merged, in `dtype` if given; None if the model's own are just that.

    Where weights are split over processes all of them call this, and only the first gets tensors.
    """
    weights = None
    if is_split(model):
        weights = whole_weights(model)
    elif has_adapters(model):
        weights = merged_weights(model)
    if dtype is not None and any(weight.dtype != dtype for weight in model.parameters()):
        weights = model.state_dict() if weights is None else weights
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    if weights and model.config.tie_word_embeddings:  # one tensor, so that it is written once
        weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    return weights


def write_model_folder(
    model: Qwen3VLForConditionalGeneration,
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """A whole model folder at `target`, or none: weights, with the tokenizer files of `source`.

    `dtype` is that of the weights on the disk, by default the model's; `finish` may add files to the folder
    before it appears. All processes of a training call this; the first one writes.
    """
    weights = export_weights(model, dtype)

    def write(folder: Path) -> None:
        save_model(model, source, folder, weights)
        if finish:
            finish(folder)

    publish_model(target, write)


def publish_model(target: str | Path, write: Callable[[Path], None]) -> None:
    """Make `target` appear at once as `write(folder)` fills it. Raises CheckpointError if the disk does not
    take it; what was at `target` before then stays. Of several processes the first one writes, the others
    wait.
    """
    words = tell(_published(Path(target), write) if is_first() else None)
    if words:
        raise CheckpointError(words)


def _published(target: Path, write: Callable[[Path], None]) -> str | None:
    """None, or why the disk did not take it."""
    try:
        checkpoints.publish(target, write)
    except OSError as error:
        return f"cannot write {target}: {checkpoints.reason(error)}"
    except SafetensorError as error:
        # The library's own words hold the system's, as in "(os error 28)".
        match = re.search(r"os error (\d+)", str(error))
        why = checkpoints.reason(OSError(int(match[1]), os.strerror(int(match[1])))) if match else error
        return f"cannot write {target}: {why}"
    return None
