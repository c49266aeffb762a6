"""A registered model evaluated again, as a Prefect flow in a clone of the worker's machine.

The deployment `evaluation/registered`; its schedule asks the champion each night. Weights and questions are
those of the version, by their hashes; code and settings are those of `ref`, so a fall in the figures is the
work of what has changed in between. The flow fails then, and whoever is told about failures is told.
"""

from __future__ import annotations

from pathlib import Path
import shutil

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.states import Failed  # noqa: E402

from flows.clones import Clone, taken  # noqa: E402
from flows.run_stage import run_module  # noqa: E402
from flows.stage import stage_environment  # noqa: E402
from stages.redact import redact  # noqa: E402
from stages.registry import REFUSED  # noqa: E402

SAID = ("registered: ", "evaluate@registered: ")
WORSE = "Worse"  # the state of a run that found the model worse than it was


@flow(name="evaluation", persist_result=False, cache_result_in_memory=False)
def evaluation(
    ref: str = "main",
    overrides: list[str] | None = None,
    alias: str = "champion",
    registry: str | None = None,
) -> State | None:
    """Ask the model that has `alias` the questions of its registration again.

    `overrides` are those of `dvc exp run -S`; `registry` is the registered model's name, by default that of
    the scale. What was found stands in an artifact. Raises RuntimeError if it could not be asked.
    """
    logger = get_run_logger()
    with taken() as clone:
        clone.checkout(clone.resolve(ref))
        if overrides:
            clone.compose(overrides)
        _clear(clone)
        lines: list[str] = []

        def line(text: str) -> None:
            lines.append(text)
            logger.info("%s", redact(text))

        words = ["stages.registered", alias, *(["--registry", registry] if registry else [])]
        code = run_module(words, clone.root, stage_environment(clone.root, "gpu", None), line, clone.held)
    told = [text for text in lines if text.strip()]
    said = next((text for text in reversed(told) if text.startswith(SAID)), told[-1] if told else "nothing")
    said = redact(said.partition(": ")[2] if said.startswith(SAID) else said)
    if code not in (0, REFUSED):
        raise RuntimeError(f"the evaluation ended with exit code {code}: {said}")
    create_markdown_artifact(f"# {alias}\n\n{said}\n", key="evaluation", description=f"{alias}, asked again")
    return Failed(name=WORSE, message=said) if code == REFUSED else None


def _clear(clone: Clone) -> None:
    """Away with what a stage of another commit left here; the cache of this machine still has it."""
    for path in ("data/needles", "data/prepared", "data/hub"):
        shutil.rmtree(clone.root / path, ignore_errors=True)
