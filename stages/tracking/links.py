"""From a hash to the run that made it, and from a pipeline to what it and its stages came to.

A run that makes outputs carries `dvc.out.<path>` = DVC's hash. So a stage that DVC takes from its cache, on
whatever machine, leads to the run that once made these bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages import headline
from stages.tracking import cost
from stages.tracking.events import allowed
from stages.tracking.target import Target

if TYPE_CHECKING:
    from mlflow.entities import Run


def maker(target: Target, path: str, dvc_hash: str) -> Run | None:
    """The newest finished run that made `path` with this hash, None if none is known."""
    found = target.client.search_runs(
        [target.experiment],
        f"tags.`{allowed(f'dvc.out.{path}')}` = '{dvc_hash}' and attributes.status = 'FINISHED'",
        max_results=1,
        order_by=["attributes.start_time DESC"],
    )
    return found[0] if found else None


def makers(target: Target, lock: Mapping[str, Any]) -> dict[str, Run]:
    """By stage of dvc.lock (`lock` are its stages) the run behind its first output."""
    firsts = {name: entry["outs"][0] for name, entry in lock.items() if entry.get("outs")}
    found = {name: maker(target, out["path"], out["md5"]) for name, out in firsts.items()}
    return {name: run for name, run in found.items() if run is not None}


def pipeline_figures(target: Target, run_id: str, results_of: Run | None) -> dict[str, float]:
    """What the stages that ran under `run_id` cost together, and what the run `results_of` found."""
    children = target.client.search_runs(
        [target.experiment], f"tags.`mlflow.parentRunId` = '{run_id}'", max_results=1000
    )
    total: Counter[str] = Counter()
    for child in children:
        total.update({name: value for name, value in child.data.metrics.items() if _costs(name)})
    found = dict(total)
    if results_of is not None:
        figures = results_of.data.metrics.items()
        found |= {name: value for name, value in figures if name.startswith(headline.PREFIX)}
    return found


def _costs(name: str) -> bool:
    return name.startswith(cost.PREFIX) and name != f"{cost.PREFIX}wall_s"  # stages run side by side
