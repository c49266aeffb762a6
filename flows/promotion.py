"""Promotion as a Prefect flow: the candidate is compared with the champion, a person may have the last word.

    python -m flows.promotion [para_grpo|sft|base] [--ask]

On a worker (the deployment `paravt-promotion/branch`) the candidate is what a pipeline recorded on a branch
`runs/...`, whose evaluations come from the DVC remote. The figures stand in an artifact of the flow run. With
`ask` a candidate that is better waits for a person, who resumes the run on its page with `approve` and a
reason; without an answer within a day it stays a candidate. A candidate that is not better is refused without
asking.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING

from stages import environment

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect import flow, get_run_logger, pause_flow_run  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.input import RunInput  # noqa: E402

from flows.clones import taken  # noqa: E402
from flows.plan import read_lock  # noqa: E402
from flows.run_stage import cause, run_dvc  # noqa: E402
from stages import params as parameters  # noqa: E402
from stages.candidate import START, RegistryError, candidate, tags_of  # noqa: E402
from stages.command import command, fail  # noqa: E402
from stages.promotion import Decision  # noqa: E402
from stages.redact import redact  # noqa: E402
from stages.registry import REFUSED, Registry, Verdict, tracking_target  # noqa: E402

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

PATIENCE_S = 24 * 3600


class Approval(RunInput):
    """What the person says who resumes the run."""

    approve: bool
    reason: str = ""
    who: str = ""


@flow(name="paravt-promotion", persist_result=False)
def promotion(
    root: str | None = None,
    name: str = "para_grpo",
    ask: bool = False,
    registry: str | None = None,
    ref: str | None = None,
) -> Verdict:
    """Register models/`name` of the checkout at `root`, and make it champion if it is better.

    Without `root` the checkout is a clone of this machine at `ref`, a branch that holds a dvc.lock. Raises
    RegistryError if the evaluations are not to be had.
    """
    logger = get_run_logger()
    with _checkout(root, ref, name) as folder:
        params = parameters.load(folder / parameters.PARAMS_FILE)
        models = Registry(tracking_target(folder), registry or f"paravt-{params.scale}")
        version = models.register(candidate(folder, name), tags_of(params, folder))
    decision = models.compare(version)
    champion = models.get("champion")
    arm = f"{version.tags['dvc.path']}, {params.method}, seed {params.seed}"
    words = {
        "candidate": f"version {version.version}, {arm}",
        "against": f"version {champion.version}" if champion else version.tags["trained.from"],
        "figures say": decision.reason,
    }
    lines = "\n".join(f"| {key} | {value} |" for key, value in words.items())
    create_markdown_artifact(f"# {models.name}\n\n| | |\n| --- | --- |\n{lines}\n", key="promotion")
    if ask and decision.better:
        said = pause_flow_run(
            wait_for_input=Approval.with_initial_data(
                description=f"{models.name}: {decision.reason}. Make it champion?", approve=True
            ),
            timeout=PATIENCE_S,
        )
        decision = _answered(said, decision, models, version, champion)
    verdict = models.conclude(version, decision)
    done = verdict.champion == verdict.version
    logger.info(
        "%s %s: %s; %s",
        models.name,
        verdict.version,
        "champion" if done else "refused",
        verdict.decision.reason,
    )
    return verdict


def _answered(
    said: Approval,
    decision: Decision,
    models: Registry,
    version: ModelVersion,
    champion: ModelVersion | None,
) -> Decision:
    """What the person decided, on the figures against the champion of now: it may be another by now."""
    now = models.get("champion")
    if said.approve and (now and now.version) != (champion and champion.version):
        decision = models.compare(version)
        if not decision.better:
            return Decision(
                False, f"the champion is another since it was asked: {decision.reason}", decision.gain
            )
    words = f"{decision.reason}; {said.who or 'a person'} {'approved' if said.approve else 'declined'}"
    return Decision(said.approve, f"{words}: {said.reason}" if said.reason else words, decision.gain)


@contextmanager
def _checkout(root: str | None, ref: str | None, name: str) -> Iterator[Path]:
    """`root`, or a clone at `ref` with the evaluations that a promotion of models/`name` looks at."""
    if root is not None:
        yield Path(root)
        return
    if ref is None:
        raise RegistryError("nothing to promote: give `ref`, the branch runs/... of a pipeline")
    with taken() as clone:
        clone.checkout(clone.resolve(ref))
        known = read_lock(clone.root)
        asked = [f"evaluate@{model}" for model in (name, START.get(name)) if f"evaluate@{model}" in known]
        said: list[str] = []
        if run_dvc(["pull", "--force", *asked, "validate"], clone.root, line=said.append, held=clone.held):
            raise RegistryError(f"the evaluations on {ref} could not be pulled: {redact(cause(said))}")
        yield clone.root


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.promotion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="para_grpo", choices=list(START))
    parser.add_argument("--ask", action="store_true", help="a candidate that is better waits for a person")
    options = parser.parse_args(arguments)
    with command("promotion"):
        if options.ask and not os.environ.get("PREFECT_API_URL"):
            fail("promotion", "--ask needs a Prefect server with pages; set PREFECT_API_URL", 2)
        verdict = promotion(str(Path.cwd()), options.name, options.ask)
    return 0 if verdict.champion == verdict.version else REFUSED


if __name__ == "__main__":
    sys.exit(main())
