"""Engines generate: token ids and frames in, sampled ids with their log-probs out.

`TransformersEngine` is imported when it is asked for, so that clients of a server need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paravt.engines.base import Engine, EngineError, Generation, Request, Sampling

if TYPE_CHECKING:
    from paravt.engines.transformers import TransformersEngine

__all__ = ["Engine", "EngineError", "Generation", "Request", "Sampling", "TransformersEngine"]


def __getattr__(name: str) -> Any:
    if name == "TransformersEngine":
        from paravt.engines.transformers import TransformersEngine

        return TransformersEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
