"""A model folder made ready to be asked: its engine and its chat encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paravt.config import EngineConfig, TransformersEngineConfig, VisualConfig
from paravt.engines.base import Engine

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.engines.limits import PromptLimits


@contextmanager
def open_model(
    folder: str | Path,
    visual: VisualConfig,
    engine: EngineConfig | None = None,
    limits: PromptLimits | None = None,
) -> Iterator[tuple[Engine, ChatEncoder]]:
    """Engine and encoder of a whole model folder, by default in this process, on the GPU if there is one.

    In this process float32 on CPU, bfloat16 on GPU. `limits` are what servers must hold, and needed for them.
    Raises model.ModelFolderError naming what the folder lacks, EngineError for servers that do not start.
    """
    from safetensors import SafetensorError
    import torch
    from transformers.utils import logging

    from paravt.engines.factory import make_engine
    from paravt.model import ModelFolderError, load_encoder

    logging.disable_progress_bar()  # a bar for one file says nothing
    encoder = load_encoder(folder, visual)
    device = "cuda" if torch.cuda.is_available() else None
    config = engine or TransformersEngineConfig()
    try:
        with make_engine(config, folder, encoder, limits, device=device) as made:
            yield made, encoder
    except SafetensorError as error:
        raise ModelFolderError(f"{folder}: the weights cannot be read ({error}); copy them again") from error
