"""The pipeline on workers, as a Prefect flow: `stage/cpu` and `stage/gpu` run stages, git is written here.

    python -m flows.remote [--ref BRANCH] [OVERRIDE ...]      starts the deployment `pipeline/remote`

Plan from DVC's status of the commit, without data; send each changed stage to its pool (`meta.pool` of
dvc.yaml), those that do not wait for each other side by side; take in their dvc.lock entries on a branch
`runs/...`, which a person or a gate merges. At the end DVC itself must call the lock up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import signal
import sys

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger, task  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.exceptions import TerminationSignal  # noqa: E402
from prefect.futures import PrefectFuture  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from flows.clones import taken  # noqa: E402
from flows.links import need_server, prefect_tags, show_runs  # noqa: E402
from flows.pipeline import PipelineFailed, gather, worth_another_try  # noqa: E402
from flows.plan import Node, Plan, make_plan  # noqa: E402
from flows.repro import record_stages  # noqa: E402
from flows.run_stage import Outcome, run_dvc  # noqa: E402
from flows.submit import Board  # noqa: E402
from stages import params as parameters  # noqa: E402
from stages.tracking import Stopped, pipeline_run  # noqa: E402


@task(
    task_run_name="{node.name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=[2, 10, 30],
    retry_jitter_factor=0.5,
    retry_condition_fn=worth_another_try,
)
def send(node: Node, board: Board) -> Outcome:
    """One stage on a worker of its pool."""
    logger = get_run_logger()
    outcome = board.run(node, logger.info)
    logger.info("%s: %s, %.1f s", node.name, "ran" if outcome.ran else "was cached", outcome.seconds)
    return outcome


@flow(
    name="pipeline",
    persist_result=False,
    cache_result_in_memory=False,
    task_runner=ThreadPoolTaskRunner(max_workers=32),
)
def pipeline(
    ref: str = "main", overrides: list[str] | None = None, targets: list[str] | None = None
) -> list[Outcome]:
    """Bring the pipeline of `ref` up to date on the workers. Raises PipelineFailed.

    `ref` is a branch, tag or commit of the repository; `overrides` are those of `dvc exp run -S`
    (`scale=smoke`); `targets` are stages, by default all.
    """
    logger = get_run_logger()
    with taken(kind="pipelines") as clone:
        branch = clone.begin(ref, overrides or [])
        commit = clone.git("rev-parse", "HEAD")
        plan = make_plan(clone.root, targets or [], data_here=False)
        logger.info("%s at %s, recorded on %s\n%s", ref, commit[:10], branch, plan)
        create_markdown_artifact(f"`{branch}`\n\n```\n{plan}\n```\n", key="plan", description="what runs")
        if not plan.steps:
            return []
        values = parameters.load(clone.root / parameters.PARAMS_FILE)
        tags = prefect_tags(str(flow_run.id)) | {"git.branch": branch, "git.sha": commit}
        with pipeline_run("pipeline", values, clone.root, tags) as (reporter, inherited):
            reporter.text(f"{plan}\n", "plan.txt")
            board = Board(clone, branch, commit, plan.graph, inherited.get("PIPELINE_RUN_ID"))
            outcomes = gather(_submit(plan, board))
            verify(clone.root, targets or [])
            record_stages(reporter, plan, clone.root)
            show_runs(clone.root, inherited.get("PIPELINE_RUN_ID"))
        return outcomes


def _submit(plan: Plan, board: Board) -> dict[str, PrefectFuture]:
    """All steps, each after those above it; waits for them. A stop cancels the children."""
    futures: dict[str, PrefectFuture] = {}
    try:
        for step in plan.steps:
            above = [futures[name] for name in step.node.upstream if name in futures]
            futures[step.node.name] = send.submit(step.node, board, wait_for=above)
        for future in futures.values():
            future.wait()
    except BaseException as end:
        board.cancel()
        if isinstance(end, TerminationSignal):  # Prefect's own word for a TERM
            raise Stopped(signal.SIGTERM) from end
        raise
    return futures


def verify(root: Path, targets: Sequence[str]) -> None:
    """DVC itself must find nothing to run. Raises PipelineFailed with what it would run."""
    said: list[str] = []
    code = run_dvc(["repro", "--allow-missing", "--dry", *targets], root, line=said.append)
    if code or any(line.startswith("Running stage") for line in said):
        raise PipelineFailed("the merged dvc.lock is not up to date: " + " | ".join(said[-5:]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.remote",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as in `dvc exp run -S`, for example scale=smoke")
    parser.add_argument("--ref", default="main", help="branch, tag or commit (%(default)s)")
    parser.add_argument("--stage", action="append", default=[], help="a stage to bring up to date; repeat")
    options = parser.parse_args(arguments)
    need_server("remote")
    from prefect.deployments import run_deployment

    run = run_deployment(
        "pipeline/remote",
        parameters={"ref": options.ref, "overrides": options.overrides, "targets": options.stage},
        timeout=None,
        poll_interval=2,
    )
    print(f"{run.name}: {run.state.name}" + (f": {run.state.message}" if run.state.message else ""))
    return 0 if run.state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main())
