"""The pipeline as a Prefect flow: DVC says what has to run, Prefect runs it, shows it and tries again.

    python -m flows.pipeline [STAGE ...] [--jobs 2]

One task per stage that the plan names, in the order of DVC's own graph; stages that do not wait for each
other run side by side if `--jobs` allows. No task is cached by Prefect (NO_CACHE): whether work is done is
DVC's to say. A failed stage is tried again only where that can help; what it feeds is not started.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
import signal
import sys

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger, task  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.exceptions import TerminationSignal  # noqa: E402
from prefect.futures import PrefectFuture  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from flows.links import prefect_tags  # noqa: E402
from flows.plan import make_plan  # noqa: E402
from flows.repro import close_killed, record_stages  # noqa: E402
from flows.run_stage import Outcome, StageFailed, run_stage, stop_all  # noqa: E402
from stages import params as parameters  # noqa: E402
from stages.command import command, fail  # noqa: E402
from stages.tracking import Stopped, pipeline_run  # noqa: E402
from stages.tracking.lifeline import lifeline  # noqa: E402


class PipelineFailed(RuntimeError):
    """Stages that failed, and those that were not started because of them."""


def worth_another_try(task, task_run, state) -> bool:
    """False for what fails again in the same way: wrong parameters, bad tables, a fault of the program."""
    try:
        state.result()
    except StageFailed as failure:
        return failure.transient
    except Exception:  # worker boundary: any other fault is of the flow itself
        return False
    return False


@task(
    task_run_name="{name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_jitter_factor=0.5,
    retry_condition_fn=worth_another_try,
)
def stage(name: str, root: str, inherited: dict[str, str]) -> Outcome:
    """Run one stage by DVC; its lines go to the log of the task."""
    logger = get_run_logger()
    outcome = run_stage(name, Path(root), inherited, logger.info)
    logger.info("%s: %s, %.1f s", name, "ran" if outcome.ran else "was up to date or cached", outcome.seconds)
    return outcome


@flow(name="paravt-pipeline", cache_result_in_memory=False, persist_result=False)
def pipeline(root: str, targets: list[str] | None = None) -> list[Outcome]:
    """Bring the pipeline at `root` up to date. Raises PipelineFailed naming what failed and what waits."""
    logger = get_run_logger()
    folder = Path(root)
    values = parameters.load(folder / parameters.PARAMS_FILE)
    plan = make_plan(folder, targets or [])
    logger.info("plan:\n%s", plan)
    if not plan.steps:
        return []
    tags = prefect_tags(str(flow_run.id))
    with pipeline_run("pipeline", values, folder, tags) as (reporter, inherited):
        reporter.text(f"{plan}\n", "plan.txt")
        futures: dict[str, PrefectFuture] = {}
        try:
            for step in plan.steps:
                above = [futures[name] for name in step.node.upstream if name in futures]
                futures[step.node.name] = stage.submit(step.node.name, root, inherited, wait_for=above)
            for future in futures.values():
                future.wait()
        except BaseException as end:
            stop_all()  # the tasks' threads wait for their commands, and Prefect for the threads
            if isinstance(end, TerminationSignal):  # Prefect's own word for a TERM
                raise Stopped(signal.SIGTERM) from end
            raise
        close_killed(folder)
        record_stages(reporter, plan, folder)
        outcomes = gather(futures)
    return outcomes


def gather(futures: Mapping[str, PrefectFuture]) -> list[Outcome]:
    """The outcomes of ended tasks by stage. Raises PipelineFailed with what failed and what waits for it."""
    outcomes, failures, waiting = [], [], []
    for name, future in futures.items():
        if future.state.is_completed():
            outcomes.append(future.result())
        elif future.state.is_pending():  # NotReady: something above it failed
            waiting.append(name)
        else:
            failures.append(str(future.result(raise_on_failure=False)))
    if failures:
        rest = f"; not started: {', '.join(waiting)}" if waiting else ""
        raise PipelineFailed("; ".join(failures) + rest)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", help="stages to bring up to date (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="stages that may run side by side (%(default)s)")
    options = parser.parse_args(arguments)
    with command("flow"):
        if options.jobs < 1:
            fail("flow", f"--jobs is {options.jobs}; write 1 or more", 2)
        local = pipeline.with_options(task_runner=ThreadPoolTaskRunner(max_workers=options.jobs))
        try:
            with lifeline(watch_starters=False, on_stop=stop_all):
                local(str(Path.cwd()), options.stages)
        except Stopped as stopped:
            fail("flow", f"stopped by {stopped.signal.name}; run again to continue", 128 + stopped.signal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
