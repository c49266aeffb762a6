"""`make repro`: the whole pipeline by `dvc repro`, inside one MLflow run.

    python -m flows.repro [STAGE ...]

Does nothing that `dvc repro` does not do, except that the stages' runs get a parent, that a stop ends DVC
and the stage together, and that runs whose processes were killed are closed. If nothing has changed, no run
is opened.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import logging
from pathlib import Path
import sys
import time

from flows.plan import Plan, make_plan, read_lock
from flows.run_stage import run_dvc, stop_all
from stages import environment
from stages import params as parameters
from stages.command import command, fail
from stages.redact import short
from stages.tracking import StageReporter, Stopped, Target, links, pipeline_run, settle
from stages.tracking.lifeline import lifeline

log = logging.getLogger("paravt")


def repro(root: Path, targets: Sequence[str] = ()) -> int:
    """Run what has changed; DVC's exit code."""
    values = parameters.load(root / parameters.PARAMS_FILE)
    plan = make_plan(root, targets)
    print(plan, flush=True)
    words = ["repro", *targets]
    if not any(step.action == "run" for step in plan.steps):
        return run_dvc(words, root)
    with pipeline_run("pipeline", values, root) as (reporter, inherited):
        reporter.text(f"{plan}\n", "plan.txt")
        code = run_dvc(words, root, inherited)
        close_killed(root)
        record_stages(reporter, plan, root)
        if code:
            # the run is FAILED by the exit code; the stage itself has said why
            raise SystemExit(code)
    return code


def record_stages(reporter: StageReporter, plan: Plan, root: Path) -> None:
    """Tags `stage.<name>` with the run that made each stage's outputs, cached ones included."""
    try:
        reporter.tags(makers(root, Target(root)))
    except Exception as error:  # worker boundary: tracking may be away, the pipeline is done all the same
        log.warning("the runs behind the stages could not be looked up (%s)", short(error))
    ran = [step.node.name for step in plan.steps if step.action == "run"]
    reporter.tags({"stages.planned": ", ".join(ran)})


def makers(root: Path, target: Target) -> dict[str, str]:
    """`stage.<name>` -> id of the run that made what dvc.lock names as the stage's first output."""
    found = links.makers(target, read_lock(root))
    return {f"stage.{name}": run.info.run_id for name, run in found.items()}


def close_killed(root: Path) -> None:
    """Close the runs of stages that were killed without a chance to say so."""
    try:
        settle(root)
    except Exception as error:  # worker boundary: tracking may be away; the next start closes them
        log.warning("runs of killed stages stay open for now (%s)", short(error))


def summary(root: Path, seconds: float) -> str:
    """What to look at when it is done."""
    lines = [f"done in {seconds:.0f} s"]
    if (root / "reports/report/report.md").exists():
        lines += ["report   reports/report/report.html", "figures  dvc metrics show", "runs     make ui"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.repro",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", help="stages to bring up to date (default: all)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    started = time.monotonic()
    with command("repro"):
        environment.apply(root)
        try:
            with lifeline(watch_starters=False, on_stop=stop_all):
                code = repro(root, options.stages)
        except Stopped as stopped:
            fail("repro", f"stopped by {stopped.signal.name}; run again to continue", 128 + stopped.signal)
        if code == 0:
            print(summary(root, time.monotonic() - started))
    return code


if __name__ == "__main__":
    sys.exit(main())
