"""Experiment tracking: one run per stage, kept on disk first and sent to MLflow as it answers.

    with stage_run("sft", params) as reporter:
        train(..., reporter)

The run goes to MLFLOW_TRACKING_URI, by default to `mlflow.db` at the repository root. It ends FINISHED,
FAILED (an exception, a non-zero exit) or KILLED (TERM, Ctrl-C, and kill -9: the next start closes it).
Starting the same work again (same command, dependencies and parameters) continues the run that did not
finish.

A run is called by its stage and by what of method and seed its work depends on: `para_grpo (vanilla_grpo,
seed 2)`, a pipeline `vanilla_grpo, seed 2`; the tag `dvc.stage` is the stage alone. What it cost stands under
`cost/` (stages.tracking.cost), what an evaluation found under `result/` (stages.headline); docs/tracking.md
lists all names.

`PIPELINE_RUN_ID` in the environment makes the run a child of the pipeline's run. Without it the runs of one
`dvc repro` share the tag `pipeline.hash`.

`python -m stages.tracking` closes the runs of dead processes and sends what waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import getpass
import logging
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any
import uuid

from pydantic import BaseModel

from paravt.config import Params
from stages.definition import Definition, definitions, dvc_hash, fingerprint, hash_all
from stages.params import PARAMS_FILE, ROOT, canonical, digest, read_yaml
from stages.redact import short
from stages.scratch import Scratch
from stages.tracking.journal import Busy, Journal
from stages.tracking.lifeline import Stopped, lifeline
from stages.tracking.reporter import StageReporter
from stages.tracking.sink import Sender, settle
from stages.tracking.system import SystemMetrics
from stages.tracking.target import Target, tracking_uri

__all__ = [
    "Busy",
    "StageReporter",
    "Stopped",
    "Target",
    "pipeline_run",
    "settle",
    "stage_run",
    "tracking_uri",
]

log = logging.getLogger("paravt.tracking")

GRACE_S = 30.0  # for sending the rest at the end, while the server answers
PIPELINE = "pipeline"
HEADLINE_STAGE = "evaluate@para_grpo"  # the model that a pipeline is there to make
SWEEP_S = 60.0  # for one who sends what an earlier attempt left
AWAY_GRACE_S = 3.0  # when it did not answer before
PARENT = "PIPELINE_RUN_ID"  # a name of our own: MLflow's MLFLOW_RUN_ID would make a stage continue its parent
FLOW_RUN = "PIPELINE_FLOW_RUN_ID"
PREFECT_TAGS = {"prefect.flow_run_id": (FLOW_RUN, "PREFECT__FLOW_RUN_ID")}
# MLflow gives colours by chance, and two arms may get one; in the order of the methods of conf/method
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948")
# what shows that a stage, or one above it, depends on method or seed
MARKS = {"method": ("method", "anchoring"), "seed": ("seed",)}


@contextmanager
def stage_run(
    name: str, params: Params | Mapping[str, Any] | None = None, root: Path | None = None
) -> Iterator[StageReporter]:
    """A tracked run called `name`; yields the reporter to hand down.

    If dvc.yaml has a stage of that name, its dependencies under data/ and models/ are logged as datasets and,
    on success, the hashes of its outputs as tags `dvc.out.<path>`. Other names (`ask`) stand alone. Raises
    SystemExit(128 + signal) after a TERM or Ctrl-C, and Busy if the same work is running already.
    """
    root = root or _root()
    stage = definitions(root).get(name) if (root / "dvc.yaml").exists() else None
    hashes = hash_all(stage.deps, root) if stage else {}
    # the same for the same work, so that a second start finds the first; unique for what is no stage
    key = fingerprint(stage, read_yaml(root / PARAMS_FILE), hashes) if stage else _unique()
    home = root / ".scratch"
    journal = Journal(home / "tracking" / f"{name}-{key}".replace("/", "_")).acquire(SWEEP_S)
    try:
        scratch = Scratch(home, key, name)
        with lifeline(), _recorded(journal, name, params, stage, hashes, root, scratch) as reporter:
            yield reporter
    except Stopped as stop:
        print(
            f"{name}: stopped by {stop.signal.name}; run again to continue where it was saved last",
            file=sys.stderr,
        )
        raise SystemExit(128 + stop.signal) from None
    finally:
        journal.release()


@contextmanager
def pipeline_run(
    name: str, params: Params | Mapping[str, Any], root: Path, tags: Mapping[str, str] | None = None
) -> Iterator[tuple[StageReporter, dict[str, str]]]:
    """The parent run of a pipeline; yields its reporter and the environment that makes stages its children.

    Without a run id in it, because tracking does not answer in time, the stages stand alone. At its end the
    run has the headline figures of the trained model and what its stages cost together. Stopping the process
    is the caller's to handle.
    """
    key = _unique()
    journal = Journal(root / ".scratch" / "tracking" / f"{name}-{key}").acquire()
    try:
        scratch = Scratch(root / ".scratch", key, name)
        with _recorded(journal, name, params, None, {}, root, scratch) as reporter:
            reporter.tags({"pipeline.hash": pipeline_hash(root)} | dict(tags or {}))
            run_id = reporter.run_id(GRACE_S)
            inherited = {PARENT: run_id} if run_id else {}
            if tags and "prefect.flow_run_id" in tags:
                inherited[FLOW_RUN] = tags["prefect.flow_run_id"]
            try:
                yield reporter, inherited
            finally:
                _conclude(reporter, root, run_id)
    finally:
        journal.release()


def _conclude(reporter: StageReporter, root: Path, run_id: str | None) -> None:
    """The figures of a pipeline's run that come from the runs of its stages."""
    from stages.tracking.links import maker, pipeline_figures

    lock_file = root / "dvc.lock"
    lock = read_yaml(lock_file).get("stages", {}) if lock_file.exists() else {}
    if lock:
        reporter.tags({"dvc.lock.md5": dvc_hash(lock_file)})
    if run_id is None:
        return
    outs = lock.get(HEADLINE_STAGE, {}).get("outs", [])
    try:
        target = Target(root)
        evaluated = maker(target, outs[0]["path"], outs[0]["md5"]) if outs else None
        reporter.summary(pipeline_figures(target, run_id, evaluated))
    except Exception as error:  # worker boundary: tracking may be away, the pipeline is done all the same
        log.warning("the figures of the stages could not be looked up (%s)", short(error))


@contextmanager
def _recorded(
    journal: Journal,
    name: str,
    params: Params | Mapping[str, Any] | None,
    stage: Definition | None,
    hashes: Mapping[str, str],
    root: Path,
    scratch: Scratch,
) -> Iterator[StageReporter]:
    """Yields the reporter; writes how it began and, whatever ends it, how it ended."""
    reporter = StageReporter(journal, name, scratch)
    values = params.model_dump(mode="json") if isinstance(params, BaseModel) else dict(params or {})
    parent = os.environ.get(PARENT)
    shown = _shown_name(name, values, stage, root)
    tags = _tags(name, values, stage, root)
    journal.append("start", name=shown, tags=tags, parent=parent, uuid=uuid.uuid4().hex)
    reporter.params(values)
    for path, value in hashes.items():
        if path.split("/")[0] in ("data", "models"):
            reporter.dataset(path, value, "input")
    sender = reporter.sender = Sender(journal, root)
    system = SystemMetrics(reporter)
    status = "FAILED"
    try:
        try:
            yield reporter
            status = "FINISHED"
            scratch.finish()
            if stage:
                _outputs(reporter, stage, root)
        except KeyboardInterrupt:  # Stopped is one
            status = "KILLED"
            raise
        except SystemExit as leave:
            status = "FINISHED" if leave.code in (None, 0) else "FAILED"
            if status == "FAILED":
                reporter.tags({"error": f"exit {leave.code}"})
            raise
        except BaseException as error:
            reporter.tags({"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            system.finish()
            reporter.costs()
            if reporter.dropped:
                reporter.tags({f"not_finite.{metric}": n for metric, n in reporter.dropped.items()})
            journal.append("end", status=status)
            if not sender.finish(AWAY_GRACE_S if sender.error else GRACE_S):
                log.warning("not all of %s has been sent; the next stage sends it, or `make settle`", name)
            elif status == "FINISHED":
                journal.delete()
    except KeyboardInterrupt:
        if status == "FINISHED":  # stopped while the rest was sent: the process does not end with 0
            journal.append("end", status="KILLED")
        raise


def _root() -> Path:
    """The project that the working folder lies in, else the working folder."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "dvc.yaml").is_file()), here)


def _unique() -> str:
    return f"{os.getpid()}-{time.time_ns()}"


def _outputs(reporter: StageReporter, stage: Definition, root: Path) -> None:
    """Tags with the hashes of what was made; weights also as a model by reference."""
    made = hash_all(stage.outs, root)
    reporter.tags({f"dvc.out.{path}": value for path, value in made.items()})
    for path, value in made.items():
        if path.startswith("models/"):
            reporter.model(path.replace("/", "-"), path, value)


def _tags(name: str, values: Mapping[str, Any], stage: Definition | None, root: Path) -> dict[str, str]:
    tags = {"dvc.stage": name, "mlflow.source.name": stage.cmd if stage else name, "mlflow.user": user()}
    if stage:
        tags["pipeline.hash"] = pipeline_hash(root)
    tags |= {key: canonical(values[key]) for key in ("scale", "method", "seed") if key in values}
    methods = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    if values.get("method") in methods:
        tags["mlflow.runColor"] = COLOURS[methods.index(values["method"]) % len(COLOURS)]
    for tag, variables in PREFECT_TAGS.items():
        if found := next((os.environ[name] for name in variables if os.environ.get(name)), None):
            tags[tag] = found
    commit = git(root, "rev-parse", "HEAD")
    if commit:
        tags |= {"git.sha": commit, "mlflow.source.git.commit": commit}
        tags["git.dirty"] = "true" if git(root, "status", "--porcelain", "--untracked-files=no") else "false"
    return tags


def _shown_name(name: str, values: Mapping[str, Any], stage: Definition | None, root: Path) -> str:
    """The name for people: a chart's legend shows nothing else of a run."""
    known = definitions(root) if stage else {}
    parts = []
    for key, word in (("method", ""), ("seed", "seed ")):
        if key not in values or (key == "method" and name.endswith(str(values[key])) and not stage):
            continue
        if stage is None or _depends(stage, MARKS[key], known):
            parts.append(f"{word}{canonical(values[key])}")
    if parts and name == PIPELINE:
        return ", ".join(parts)  # the runs table cuts longer names, and these rows are its first level
    return f"{name} ({', '.join(parts)})" if parts else name


def _depends(stage: Definition, groups: tuple[str, ...], known: Mapping[str, Definition]) -> bool:
    """True if the stage, or one whose outputs it reads, has one of these groups of params.yaml."""
    if set(groups) & set(stage.params):
        return True
    above = [other for other in known.values() if set(other.outs) & set(stage.deps)]
    return any(_depends(other, groups, known) for other in above)


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return str(os.getuid())


def pipeline_hash(root: Path) -> str:
    """What all stages of one `dvc repro` have in common: dvc.yaml, params.yaml and the code."""
    code = {
        path.relative_to(root).as_posix(): dvc_hash(path)
        for folder in ("paravt", "stages")
        for path in sorted((root / folder).rglob("*.py"))
    }
    return digest(read_yaml(root / PARAMS_FILE), read_yaml(root / "dvc.yaml"), code)


def git(root: Path, *words: str) -> str:
    """The output of a git command, empty if there is no repository, no commit or no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
