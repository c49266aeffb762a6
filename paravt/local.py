"""A model folder made ready to be asked in this process: its engine and its chat encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paravt.config import VisualConfig

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.engines import TransformersEngine


def open_model(
    folder: str | Path, visual: VisualConfig, max_batch_tokens: int = 65_536
) -> tuple[TransformersEngine, ChatEncoder]:
    """Engine and encoder of a whole model folder, on the GPU if there is one.

    float32 on CPU, bfloat16 on GPU. Raises model.ModelFolderError naming what the folder lacks.
    """
    from safetensors import SafetensorError
    import torch
    from transformers.utils import logging

    from paravt.engines import TransformersEngine
    from paravt.model import ModelFolderError, load_encoder, load_model

    logging.disable_progress_bar()  # a bar for one file says nothing
    gpu = torch.cuda.is_available()
    encoder = load_encoder(folder, visual)
    try:
        model = load_model(folder, torch.bfloat16 if gpu else torch.float32)
    except SafetensorError as error:
        raise ModelFolderError(f"{folder}: the weights cannot be read ({error}); copy them again") from error
    engine = TransformersEngine(model, encoder.end_ids, max_batch_tokens, "cuda" if gpu else None)
    return engine, encoder
