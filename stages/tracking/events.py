"""What each recorded event becomes in MLflow.

A parameter is written once, in one spelling. On a resume the values are compared: what differs becomes a tag
`changed.<name>`, since a parameter of a run cannot change. Long values lie in an artifact; their hash is the
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from pathlib import Path
import posixpath
import re
from typing import TYPE_CHECKING, Any

from stages.tracking import spans

if TYPE_CHECKING:
    from mlflow.entities import Run

    from stages.tracking.target import Target

PARAMS_A_CALL = 90  # MLflow takes 100 parameters a call
TAG_LENGTH = 5000
UUID = "record.uuid"  # of the start that made the run


def apply(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    """Send one event. `state` holds the run id from the start event on; `folder` is where files wait."""
    _APPLY[event["kind"]](event, state, folder, target)


def allowed(name: str) -> str:
    """A name that MLflow takes: letters, digits, `_ - . : /` and spaces; no empty or dotted path parts."""
    name = re.sub(r"[^\w.\- :/]", "_", name)
    return posixpath.normpath(name).lstrip("/.") or "_"


def _start(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    tags = dict(event["tags"])
    if event.get("parent"):
        tags["mlflow.parentRunId"] = event["parent"]
    run = _find(state.get("run_id"), target)
    if run is not None:
        attempts = int(run.data.tags.get("attempts", "1")) + 1
        target.client.update_run(run.info.run_id, status="RUNNING")
        if "error" in run.data.tags:
            tags[f"attempt {attempts - 1} error"] = run.data.tags["error"]
            target.client.delete_tag(run.info.run_id, "error")
        _set_tags(run.info.run_id, tags | {"attempts": str(attempts)}, target)
        return
    run = _made_before(event, target) or target.client.create_run(
        target.experiment,
        start_time=int(event["time"] * 1000),
        tags=tags | ({UUID: event["uuid"]} if "uuid" in event else {}),
        run_name=event["name"],
    )
    state["run_id"] = run.info.run_id


def _made_before(event: Mapping[str, Any], target: Target) -> Run | None:
    """The run that a server made for this start without our hearing of it."""
    if "uuid" not in event:
        return None  # the record is older than that
    wanted = f"tags.`{UUID}` = '{event['uuid']}'"
    return next(iter(target.client.search_runs([target.experiment], wanted, max_results=1)), None)


def _find(run_id: str | None, target: Target) -> Run | None:
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = target.client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _params(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    from mlflow.entities import Param

    run_id = state["run_id"]
    there = target.client.get_run(run_id).data.params
    values = {allowed(name): value for name, value in event["values"].items()}
    new = [Param(name, value) for name, value in values.items() if name not in there]
    for first in range(0, len(new), PARAMS_A_CALL):
        target.client.log_batch(run_id, params=new[first : first + PARAMS_A_CALL])
    changed = {
        f"changed.{name}": f"{there[name]} -> {value}"
        for name, value in values.items()
        if there.get(name, value) != value
    }
    if changed:
        _set_tags(run_id, changed, target)


def _metrics(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    from mlflow.entities import Metric

    metrics = [
        Metric(allowed(name), value, int(each["time"] * 1000), each["step"])
        for each in event["steps"]
        for name, value in each["values"].items()
    ]
    target.client.log_batch(state["run_id"], metrics=metrics)


def _tags(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    _set_tags(state["run_id"], event["values"], target)


def _set_tags(run_id: str, values: Mapping[str, str], target: Target) -> None:
    from mlflow.entities import RunTag

    target.client.log_batch(
        run_id, tags=[RunTag(allowed(key), value[:TAG_LENGTH]) for key, value in values.items()]
    )


def _artifact(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    path = folder / event["file"]
    if path.is_dir():
        inside = posixpath.join(event["folder"], path.name) if event["folder"] else path.name
        target.client.log_artifacts(state["run_id"], str(path), inside)
    elif path.exists():
        target.client.log_artifact(state["run_id"], str(path), event["folder"] or None)


def _table(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    import pandas as pd

    name = event["name"]
    frame = pd.DataFrame(event["rows"], columns=event["columns"])
    there = target.client.list_artifacts(state["run_id"], posixpath.dirname(name) or None)
    if any(item.path == name for item in there):
        # log_table would append to what an earlier attempt has sent
        text = frame.to_json(orient="split", index=False)
        target.client.log_text(state["run_id"], text, name)
    else:
        target.client.log_table(state["run_id"], frame, name)


def _nothing(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    """Kept on disk alone: the run's costs are computed from it at the end."""


def _dataset(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"path": event["path"], "dvc": event["hash"]})
    # MLflow keeps 36 characters of a digest: an MD5 with `.dir` fits exactly
    dataset = Dataset(event["path"], event["hash"][:36], "dvc", source)
    target.client.log_inputs(
        state["run_id"], [DatasetInput(dataset, [InputTag("mlflow.data.context", event["role"])])]
    )


def _model(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    import mlflow

    mlflow.create_external_model(
        name=event["name"],
        source_run_id=state["run_id"],
        experiment_id=target.experiment,
        model_type="dvc",
        tags={"dvc.path": event["path"], "dvc.hash": event["hash"]},
    )


def _trace(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    trace_id = spans.send(event["tree"], event["began"], target.experiment, state["run_id"])
    # the exporter only logs what goes wrong; asking for the trace is what raises
    target.client.get_trace(trace_id, display=False)


def _end(event: Mapping[str, Any], state: dict[str, Any], folder: Path, target: Target) -> None:
    ended = event.get("ended", event["time"])
    target.client.set_terminated(state["run_id"], event["status"], int(ended * 1000))


_APPLY = {
    "start": _start,
    "params": _params,
    "metrics": _metrics,
    "tags": _tags,
    "artifact": _artifact,
    "table": _table,
    "spent": _nothing,
    "dataset": _dataset,
    "model": _model,
    "trace": _trace,
    "end": _end,
}
