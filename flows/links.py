"""From a Prefect run to the MLflow runs behind it, by an artifact, and back, by the tag `prefect.url`; and
whether there is a Prefect server at all.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.urls import url_for

from flows.plan import read_lock
from stages.command import UNUSABLE, fail
from stages.redact import short
from stages.tracking import Target
from stages.tracking.links import makers

log = logging.getLogger("paravt.flows")


def need_server(name: str) -> None:
    """Raises SystemExit(2), for the command `name`, if no server is named: Prefect would start one for it."""
    if not os.environ.get("PREFECT_API_URL"):
        fail(name, "PREFECT_API_URL is not set; write for example http://127.0.0.1:4200/api", UNUSABLE)


def prefect_tags(run_id: str) -> dict[str, str]:
    """Tags for an MLflow run: which Prefect run it belongs to, and that run's page."""
    page = url_for(FlowRun, run_id)
    return {"prefect.flow_run_id": run_id} | ({"prefect.url": page} if page else {})


def show_runs(root: Path, pipeline_run: str | None) -> None:
    """A table of MLflow's pages, if it has pages: the pipeline's run, and the one behind each stage.

    For a stage that DVC took from its cache that is the run that once made its output.
    """
    try:
        target = Target(root)
        found = {"pipeline": pipeline_run} if pipeline_run else {}
        found |= {name: run.info.run_id for name, run in makers(target, read_lock(root)).items()}
        pages = {name: page for name, run in found.items() if (page := target.page(run))}
        if not pages:
            return
        lines = "\n".join(f"| {name} | [{page}]({page}) |" for name, page in pages.items())
        create_markdown_artifact(
            f"| stage | MLflow run |\n| --- | --- |\n{lines}\n",
            key="mlflow",
            description="the runs in MLflow",
        )
    except Exception as error:  # worker boundary: tracking may be away, the pipeline is done all the same
        log.warning("no links to MLflow: %s", short(error))
