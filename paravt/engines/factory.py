"""One way to an engine: what `engine` of params.yaml says, ready to generate, and ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paravt.config import EngineConfig, TransformersEngineConfig
from paravt.engines.base import Engine
from paravt.engines.limits import ModelFacts, PromptLimits
from paravt.weights import real_folder

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration

    from paravt.chat import ChatEncoder

LOGS = Path(".scratch/vllm")


@contextmanager
def make_engine(
    config: EngineConfig,
    folder: str | Path,
    encoder: ChatEncoder,
    limits: PromptLimits | None = None,
    model: Qwen3VLForConditionalGeneration | None = None,
    device: str | None = None,
    log_folder: str | Path = LOGS,
) -> Iterator[Engine]:
    """The engine of `config` on the model in `folder`.

    `transformers` samples from `model` itself (loaded from the folder if None, in the configured dtype);
    `vllm` from servers with the folder's weights, room for `limits`, logs in `log_folder`. Raises EngineError
    if servers do not start or are not those expected.
    """
    if isinstance(config, TransformersEngineConfig):
        import torch

        from paravt.engines.transformers import TransformersEngine
        from paravt.model import load_model

        if model is None:
            model = load_model(folder, getattr(torch, config.precision(device)))
        yield TransformersEngine(model, encoder.end_ids, config.max_batch_tokens, device)
        return

    if limits is None:
        raise ValueError("servers are started with room for the prompts to come; give their limits")
    from paravt.engines.server import ServerPlan
    from paravt.engines.vllm import VLLMEngine

    plan = ServerPlan(config, real_folder(folder), ModelFacts.of(folder), limits, encoder.visual)
    engine = VLLMEngine(plan, encoder.end_ids, log_folder)
    try:
        yield engine
    finally:
        engine.close()
