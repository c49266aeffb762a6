"""The worker's side: one stage of one commit, in a clone of this machine, as a Prefect flow.

    checkout -> upstream entries into dvc.lock -> dvc pull upstream -> dvc repro --single-item --pull
    -> dvc push -> the stage's own entry of dvc.lock as a table artifact

The worker reads the repository and writes the DVC remote; it never writes git. A stage that says why it ends
gives the state `Refused`, which is not tried again; whatever else ends it may be tried on another worker.
"""

from __future__ import annotations

import os
from pathlib import Path
import re
from typing import Any

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger  # noqa: E402
from prefect.artifacts import (  # noqa: E402
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.states import Failed  # noqa: E402

from flows import locks  # noqa: E402
from flows.clones import Clone, CloneError, taken, work_folder  # noqa: E402
from flows.plan import make_plan, read_lock  # noqa: E402
from flows.repro import close_killed  # noqa: E402
from flows.run_stage import STAGE_PYTHON, Outcome, StageFailed, run_stage  # noqa: E402
from paravt.data.media import VARIABLE as MEDIA_ROOT  # noqa: E402
from stages.redact import redact  # noqa: E402

REFUSED = "Refused"
VLLM_PYTHON = "PARAVT_VLLM_PYTHON"  # paravt.engines.server reads it; importing that would load torch
INSTALLATION = Path(__file__).resolve().parents[1]  # whose environment the worker was started in
PROGRESS = re.compile(r"\[[# ]{24}\] (\d+)/(\d+)")


def entry_key(name: str) -> str:
    """The key of the artifact that holds a stage's entry; keys are lower case letters, digits and dashes."""
    return f"lock-{_slug(name)}"


@flow(name="stage", persist_result=False, cache_result_in_memory=False)
def stage(
    name: str,
    commit: str,
    upstream: dict[str, Any] | None = None,
    pool: str = "cpu",
    pipeline_run: str | None = None,
) -> Any:
    """Run the stage `name` of `commit`. `upstream` are the dvc.lock entries of all stages above it.

    `pipeline_run` is the MLflow run of the pipeline. Without `upstream` the entries of the commit's own
    dvc.lock are taken, so that one stage can also be started by a person.
    """
    logger = get_run_logger()
    try:
        with taken() as clone:
            clone.checkout(commit)
            return _in(clone, name, upstream or {}, pool, pipeline_run)
    except (CloneError, locks.LockError) as error:
        logger.error("%s", error)
        return _refusal(str(error))
    except StageFailed as failure:
        logger.error("%s", failure)
        if failure.transient:
            raise
        return _refusal(str(failure))


def _in(
    clone: Clone, name: str, upstream: dict[str, Any], pool: str, pipeline_run: str | None
) -> State | None:
    logger = get_run_logger()
    locks.merge(clone.root, upstream)
    nodes = {node.name: node for node in make_plan(clone.root, data_here=False).graph}
    if name not in nodes:
        return _refusal(f"there is no stage {name!r} in this commit; there are {', '.join(nodes)}")
    progress = _Progress(name)

    def line(text: str) -> None:
        logger.info("%s", redact(text))
        progress.take(text)

    try:
        outcome = run_stage(
            name,
            clone.root,
            stage_environment(clone.root, pool, pipeline_run),
            line,
            nodes[name].upstream,
            clone.held,
        )
    except StageFailed:
        close_killed(clone.root)
        raise
    publish(name, read_lock(clone.root)[name], outcome)
    return None


def stage_environment(root: Path, pool: str, pipeline_run: str | None) -> dict[str, str]:
    """What a stage is told by its environment: its code, the interpreter of its pool, its parent run; and
    what clones do not hold, where the operator has not said it: vLLM beside the worker's own installation,
    one media root for all clones of this machine.
    """
    env = {"PYTHONPATH": str(root)}
    beside = INSTALLATION / ".venv-vllm" / "bin" / "python"
    if not os.environ.get(VLLM_PYTHON) and os.access(beside, os.X_OK):
        env[VLLM_PYTHON] = str(beside)
    if not os.environ.get(MEDIA_ROOT):
        env[MEDIA_ROOT] = str(work_folder() / "media")
    if python := os.environ.get(f"{STAGE_PYTHON}_{pool.upper()}"):
        env[STAGE_PYTHON] = python
    if pipeline_run:
        env["PIPELINE_RUN_ID"] = pipeline_run
    return env


def publish(name: str, entry: dict[str, Any], outcome: Outcome) -> None:
    """The entry as a table of the flow run; the parent reads it from there."""
    how = "ran" if outcome.ran else "was up to date or cached"
    create_table_artifact(
        key=entry_key(name),
        table=locks.to_rows(entry),
        description=f"dvc.lock of `{name}`, which {how}; {outcome.seconds:.1f} s",
    )


def _refusal(words: str) -> State:
    return Failed(name=REFUSED, message=redact(words))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class _Progress:
    """A bar in the Prefect page for a stage that reports `[####   ] 3/60`; made at its first report."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._artifact: Any = None

    def take(self, text: str) -> None:
        found = PROGRESS.search(text)
        if not found or not int(found[2]):
            return
        share = min(100.0, 100 * int(found[1]) / int(found[2]))
        if self._artifact is None:
            self._artifact = create_progress_artifact(
                share, key=f"progress-{_slug(self._name)}", description=f"{self._name}: {found[1]}/{found[2]}"
            )
        else:
            update_progress_artifact(
                self._artifact, progress=share, description=f"{self._name}: {found[1]}/{found[2]}"
            )
