"""Benchmarks: load questions, ask them, score the answers, say how sure the score is.

Importing this registers the seven published splits and the needle split.
"""

from __future__ import annotations

from paravt.benchmarks import charades, longvideobench, lvbench, mlvu, mmvu, needles, videomme
from paravt.benchmarks.registry import Benchmark, Place, Questions, get, names, register

PUBLISHED = ("videomme", "videomme_wsub", "longvideobench", "lvbench", "mlvu", "mmvu", "charades")

__all__ = [
    "PUBLISHED",
    "Benchmark",
    "Place",
    "Questions",
    "charades",
    "get",
    "longvideobench",
    "lvbench",
    "mlvu",
    "mmvu",
    "names",
    "needles",
    "register",
    "videomme",
]
