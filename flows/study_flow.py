"""The method study as a Prefect flow: `make study` at one commit, in a clone of the worker's machine.

Its parts are DVC stages of the project in study/, so a study that is stopped and started again does not
repeat what is done on this machine.
"""

from __future__ import annotations

from pathlib import Path

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402

from flows.clones import taken  # noqa: E402
from flows.run_stage import run_module  # noqa: E402
from flows.stage import stage_environment  # noqa: E402
from stages.redact import redact  # noqa: E402

REPORT = Path("study/report/report.md")


@flow(name="study", persist_result=False, cache_result_in_memory=False)
def study(ref: str = "main", groups: list[str] | None = None, jobs: int = 1) -> None:
    """Run the study of `ref`; its report becomes an artifact. Raises RuntimeError if a run of it failed."""
    logger = get_run_logger()
    with taken() as clone:
        clone.checkout(clone.resolve(ref))
        words = ["flows.study", "--jobs", str(jobs), *(groups or [])]
        code = run_module(
            words,
            clone.root,
            stage_environment(clone.root, "gpu", None),
            lambda text: logger.info("%s", redact(text)),
            clone.held,
        )
        if (clone.root / REPORT).is_file():
            text = (clone.root / REPORT).read_text(encoding="utf-8")
            create_markdown_artifact(text, key="study-report", description="the method study")
        if code:
            raise RuntimeError(f"the study ended with exit code {code}; its log says which runs failed")
