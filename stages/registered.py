"""Evaluate a registered model again, with the code and the settings of this checkout.

    python -m stages.registered [champion|candidate] [--registry NAME]

The version's weights and the data that its evaluation read come from DVC by their hashes, so the questions
are the same ones. Writes reports/registered (as reports/evaluate/NAME) and a run in MLflow; tags
`evaluation.*` of the version say which run, when, and how it compares with what the version was registered
with. Ends with 3 if it is worse beyond noise: then something below the weights has changed for the worse.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import shutil
import sys
from typing import TYPE_CHECKING

from paravt import benchmarks
from paravt.config import Params
from paravt.weights import REFERENCE, referenced
from stages import media
from stages import params as parameters
from stages.candidate import RESULTS, RegistryError, fetch
from stages.command import command
from stages.definition import dvc_hash
from stages.evaluate import SCRATCH, evaluate_into
from stages.promotion import stands
from stages.registry import CANDIDATE, CHAMPION, INPUT, REFUSED, Registry, tracking_target
from stages.tracking import StageReporter, stage_run

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

MODEL, REPORT = Path("models/registered"), Path("reports/registered")
NAME = "registered"
RUN_ID_S = 30.0


def bring(version: ModelVersion, root: Path) -> None:
    """Weights and data of the version at their places in the checkout.

    Raises RegistryError if they are not to be had, or if other data lies where they belong.
    """
    inputs = {key.removeprefix(INPUT): value for key, value in version.tags.items() if key.startswith(INPUT)}
    if not inputs:
        raise RegistryError(
            f"version {version.version} does not say which data it was evaluated on; register it again"
        )
    for path, value in inputs.items():
        here = dvc_hash(root / path)
        if here not in (None, value):
            raise RegistryError(
                f"{path} is not what version {version.version} was evaluated on ({value}); run this in a "
                "fresh clone, or as the deployment `evaluation/registered`"
            )
        if here is None:
            _place(root, value, Path(path))
    if dvc_hash(root / MODEL) != version.tags["dvc.hash"]:
        shutil.rmtree(root / MODEL, ignore_errors=True)
        fetch(root, version.tags["dvc.hash"], MODEL)


def _place(root: Path, value: str, path: Path) -> None:
    """Fetched under another name first: at its own, DVC would see the output of a stage tracked twice."""
    aside = path.with_name(f"fetched-{path.name}")
    shutil.rmtree(root / aside, ignore_errors=True)
    fetch(root, value, aside)
    (root / aside).rename(root / path)


def evaluate_registered(
    registry: Registry, version: ModelVersion, params: Params, root: Path, reporter: StageReporter
) -> tuple[bool, str]:
    """(False if it is worse beyond noise than when it was registered, that comparison in a sentence)."""
    bring(version, root)
    if (root / MODEL / REFERENCE).is_file():
        media.ensure(referenced(root / MODEL))
    reporter.tags({"registered.model": registry.name, "registered.version": version.version})
    needles = benchmarks.get("needles")
    # published splits are no part of what it was registered with
    config = params.evaluate.model_copy(update={"benchmarks": []})
    now = evaluate_into(
        REPORT, NAME, MODEL, needles, params.model_copy(update={"evaluate": config}), reporter
    )
    good, words = stands(now, registry.results(version, RESULTS) or [])
    if good is None:
        raise RegistryError(f"version {version.version}: {words}; register it again with these settings")
    run = reporter.run_id(RUN_ID_S)
    registry.tag(version.version, "evaluation", {"reason": words, "run": run or ""})
    reporter.tags({"evaluation.reason": words})
    (SCRATCH / f"{NAME}.jsonl").unlink(missing_ok=True)  # the next evaluation asks again
    return good, words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.registered",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("alias", nargs="?", default=CHAMPION, choices=[CHAMPION, CANDIDATE])
    parser.add_argument("--registry", help="name of the registered model (default: paravt-SCALE)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    with command("registered"):
        params = parameters.load()
        registry = Registry(tracking_target(root), options.registry or f"paravt-{params.scale}")
        version = registry.get(options.alias)
        if version is None:
            raise RegistryError(f"{registry.name} has no {options.alias}")
        with stage_run(f"evaluate {options.alias}", params) as reporter:
            good, words = evaluate_registered(registry, version, params, root, reporter)
        print(f"registered: {registry.name} {version.version}: {words}")
    return 0 if good else REFUSED


if __name__ == "__main__":
    sys.exit(main())
