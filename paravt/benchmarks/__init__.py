"""Benchmarks: load questions, ask them, score the answers, say how sure the score is."""

from __future__ import annotations

from paravt.benchmarks import needles  # registers the needle split
from paravt.benchmarks.registry import Benchmark, get, names, register

__all__ = ["Benchmark", "get", "names", "needles", "register"]
