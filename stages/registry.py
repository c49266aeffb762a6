"""The model registry: candidates by reference, one champion, each decision with its reason.

    python -m stages.registry register [para_grpo|sft|base]   models/NAME as the candidate
    python -m stages.registry promote  [para_grpo|sft|base]   the same, then champion if it is better
    python -m stages.registry rollback                        the champion before this one, again
    python -m stages.registry show
    python -m stages.registry fetch champion models/champion  its weights, from DVC

A version is a reference: DVC's path and hash of the weights, and the results of its evaluation; no weights
are uploaded. `promote` compares it with the champion question by question (stages.promotion); with no
champion yet, with the model that its training started from. What was decided, and why, stands in the
version's tags `promotion.*`. `promote --force --reason "..."` is a person's decision against the figures, and
says so.

Reads dvc.lock, models/NAME's hash and reports/evaluate/NAME; the results must be those of these weights. Ends
with 3 if the candidate is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import hashlib
from pathlib import Path
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from paravt.benchmarks.results import Result, read_results
from stages import params as parameters
from stages.candidate import RESULTS, START, Candidate, RegistryError, candidate, fetch, tags_of
from stages.command import command
from stages.headline import headline
from stages.promotion import PROTOCOL, QUESTIONS, Decision, decide, other_asking
from stages.redact import redact, short
from stages.tracking import Target, user
from stages.tracking.links import maker

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE, CHAMPION = "candidate", "champion"
START_RESULTS = "start.jsonl"
INPUT = "dvc.in."  # begins the tags of the data that a version's evaluation read
DECISION, ROLLED_BACK = "promotion.decision", "rolled back"
REFUSED = 3


@dataclass(frozen=True)
class Verdict:
    """`champion` is the version that holds the alias afterwards, None if there is none."""

    version: str
    decision: Decision
    champion: str | None


class Registry:
    """One registered model on the tracking server."""

    def __init__(self, target: Target, name: str) -> None:
        self.target, self.name = target, name
        self.client = target.client

    def get(self, alias: str) -> ModelVersion | None:
        """The version that has the alias."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_model_version_by_alias(self.name, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def register(self, new: Candidate, values: Mapping[str, str]) -> ModelVersion:
        """`new` as the version with the alias `candidate`; a version that it is already is taken again.

        `values` are more tags.
        """
        content = new.results.read_bytes()
        evidence = hashlib.sha256(content).hexdigest()[:16]
        asked = {QUESTIONS: new.questions, PROTOCOL: new.protocol}
        asked |= {f"{INPUT}{path}": value for path, value in new.inputs.items()}
        self._make_name()
        for version in self.client.search_model_versions(f"name = '{self.name}'"):
            same = {"dvc.hash": new.dvc_hash, "results": evidence}
            if same.items() <= version.tags.items():
                for key, value in asked.items():  # a version of before they were kept
                    self.client.set_model_version_tag(self.name, version.version, key, value)
                break
        else:
            tags = {"dvc.path": new.path, "dvc.hash": new.dvc_hash, **asked}
            tags |= {"results": evidence, "trained.from": START[new.name] or "nothing", **values}
            version = self._create(new, tags)
        if self.get(CHAMPION) is None or self.get(CHAMPION).version != version.version:
            self.client.set_registered_model_alias(self.name, CANDIDATE, version.version)
        return self.client.get_model_version(self.name, version.version)

    def _make_name(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(
                self.name, description="Weights by DVC hash; `champion` is in use."
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _create(self, new: Candidate, tags: Mapping[str, str]) -> ModelVersion:
        import mlflow

        run = maker(self.target, new.path, new.dvc_hash)
        run_id = run.info.run_id if run else None
        tags = dict(tags)
        if run and "git.sha" in run.data.tags:
            tags["git.sha"] = run.data.tags["git.sha"]
        # a model of its own, not the one of the training's run: this one carries its evaluation
        model = mlflow.create_external_model(
            name=new.path.replace("/", "-"),
            source_run_id=run_id,
            experiment_id=self.target.experiment,
            model_type="dvc",
            tags=tags,
        )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / RESULTS).write_bytes(new.results.read_bytes())
            if new.start:
                (Path(folder) / START_RESULTS).write_bytes(new.start.read_bytes())
            self.client.log_model_artifacts(model.model_id, folder)
        version = self.client.create_model_version(
            self.name, f"models:/{model.model_id}", run_id, tags, model_id=model.model_id
        )
        self._figures(model.model_id, run_id, read_results(new.results))
        return version

    def _figures(self, model_id: str, run_id: str | None, results: Sequence[Result]) -> None:
        """The headline figures as metrics of the model; MLflow keeps them by the run that it comes from."""
        if run_id is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = {name: value for name, value in headline(results).items() if value is not None}
        metrics = [
            Metric(name, value, now, 0, model_id=model_id, run_id=run_id) for name, value in found.items()
        ]
        self.client.log_batch(run_id, metrics=metrics)

    def compare(self, version: ModelVersion) -> Decision:
        """The version against the champion; without a champion, against what it was trained from."""
        champion = self.get(CHAMPION)
        if version.tags.get(DECISION) == ROLLED_BACK:
            return Decision(
                False, f"version {version.version} was rolled back: {version.tags['promotion.reason']}"
            )
        mine = self.results(version, RESULTS)
        if champion is None:
            start = self.results(version, START_RESULTS)
            if start is None:
                return Decision(False, "there is no champion and no start to compare with; use --force")
            found = decide(mine, start)
            return Decision(found.better, f"{found.reason} ({version.tags['trained.from']})", found.gain)
        if champion.version == version.version:
            return Decision(True, version.tags.get("promotion.reason", "it is the champion"))
        asked = self._asked(champion, version.tags)
        if asked is None:
            return Decision(
                False,
                f"the champion, version {champion.version}, {other_asking(version.tags, champion.tags)}; "
                "evaluate it as this one and register it again",
            )
        found = decide(mine, self.results(asked, RESULTS) or [])
        return Decision(found.better, f"{found.reason} (version {champion.version})", found.gain)

    def _asked(self, champion: ModelVersion, tags: Mapping[str, str]) -> ModelVersion | None:
        """The version with the champion's weights that was asked as `tags` say, itself if it was."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        for version in [champion, *versions]:
            same = version.tags.get("dvc.hash") == champion.tags["dvc.hash"]
            if same and not other_asking(tags, version.tags):
                return version
        return None

    def results(self, version: ModelVersion, name: str) -> list[Result] | None:
        """The results that were kept with a version; None if it has no file of that name."""
        from mlflow.artifacts import download_artifacts, list_artifacts

        place = self.client.get_logged_model(version.source.removeprefix("models:/")).artifact_location
        if name not in {Path(item.path).name for item in list_artifacts(place)}:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return read_results(download_artifacts(f"{place}/{name}", dst_path=folder))

    def conclude(self, version: ModelVersion, decision: Decision, forced: bool = False) -> Verdict:
        """Give the alias, or refuse; tags say which, why, against what, by whom and when."""
        champion = self.get(CHAMPION)
        number, before = str(version.version), str(champion.version) if champion else None
        if before == number:
            return Verdict(number, decision, before)
        take = decision.better or forced
        if not take and version.tags.get(DECISION) == ROLLED_BACK:
            return Verdict(number, decision, before)  # it says so for good
        state = ("promoted by a person" if forced else "promoted") if take else "refused"
        tags = {
            "decision": state,
            "reason": decision.reason,
            "against": before or version.tags["trained.from"],
        }
        self.tag(number, "promotion", tags)
        if take:
            self.tag(number, "promotion", {"before": before or ""})
            self.client.set_registered_model_alias(self.name, CHAMPION, number)
            standing = self.get(CANDIDATE)
            if standing is not None and str(standing.version) == number:
                self.client.delete_registered_model_alias(self.name, CANDIDATE)
        return Verdict(number, decision, number if take else before)

    def rollback(self, reason: str) -> tuple[str, str]:
        """(version that was champion, version that is it again). Raises RegistryError without one before."""
        champion = self.get(CHAMPION)
        if champion is None:
            raise RegistryError(f"{self.name} has no champion")
        before = champion.tags.get("promotion.before")
        if not before:
            raise RegistryError(
                f"version {champion.version} of {self.name} is its first champion; none was before"
            )
        self.tag(champion.version, "promotion", {"decision": ROLLED_BACK, "reason": reason})
        self.client.set_registered_model_alias(self.name, CHAMPION, before)
        return str(champion.version), before

    def tag(self, version: str, what: str, values: Mapping[str, str]) -> None:
        """Tags `what.KEY` of a version, with who set them and when."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for key, value in {**values, "by": user(), "time": when}.items():
            self.client.set_model_version_tag(self.name, version, f"{what}.{key}", redact(value))

    def table(self) -> list[str]:
        """One line a version, newest first."""
        from mlflow.exceptions import MlflowException

        try:
            aliases = self.client.get_registered_model(self.name).aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return [f"{self.name}: no version is registered"]
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        lines = []
        for version in sorted(versions, key=lambda item: -int(item.version)):
            tags = version.tags
            named = ", ".join(
                alias for alias, number in aliases.items() if str(number) == str(version.version)
            )
            state = tags.get("promotion.decision", "not decided")
            arm = f"{tags['dvc.path']} {tags.get('method', '')} seed {tags.get('seed', '?')}"
            head = f"{self.name} {version.version}" + (f" [{named}]" if named else "")
            lines.append(f"{head}  {arm}  {state}: {tags.get('promotion.reason', 'no reason yet')}")
        return lines


def promote(registry: Registry, new: Candidate, values: Mapping[str, str], forced: str = "") -> Verdict:
    """Register, compare, conclude. `forced` is a person's reason to promote whatever the figures say."""
    version = registry.register(new, values)
    decision = Decision(True, forced) if forced else registry.compare(version)
    return registry.conclude(version, decision, bool(forced))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.registry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("register", "promote", "rollback", "show", "fetch"):
        part = actions.add_parser(action)
        part.add_argument("--registry", help="name of the registered model (default: paravt-SCALE)")
        if action in ("register", "promote"):
            part.add_argument("name", nargs="?", default="para_grpo", choices=list(START))
        if action == "promote":
            part.add_argument("--force", action="store_true", help="promote whatever the figures say")
        if action in ("promote", "rollback"):
            part.add_argument("--reason", default="", help="why; kept as a tag")
        if action == "fetch":
            part.add_argument("alias", help="candidate or champion")
            part.add_argument("folder", type=Path, help="where the weights are put")
    options = parser.parse_args(arguments)
    if options.action == "promote" and options.force != bool(options.reason):
        parser.error("--force needs --reason, and --reason is for --force: without them the figures decide")
    root = Path.cwd()
    with command("registry"):
        params = parameters.load()
        name = options.registry or f"paravt-{params.scale}"
        registry = Registry(tracking_target(root), name)
        if options.action in ("register", "promote"):
            new, values = candidate(root, options.name), tags_of(params, root)
            if options.action == "register":
                version = registry.register(new, values)
                print(f"{name} {version.version}: {new.path} is the candidate")
                return 0
            verdict = promote(registry, new, values, options.reason)
            done = verdict.champion == verdict.version
            print(f"{name} {verdict.version}: {'champion' if done else 'refused'}; {verdict.decision.reason}")
            return 0 if done else REFUSED
        if options.action == "rollback":
            was, now = registry.rollback(options.reason or "no reason given")
            print(f"{name}: version {now} is champion again, version {was} is rolled back")
        elif options.action == "fetch":
            version = registry.get(options.alias)
            if version is None:
                raise RegistryError(f"{name} has no {options.alias}")
            fetch(root, version.tags["dvc.hash"], options.folder)
            print(f"{options.folder}: version {version.version} of {name}, {version.tags['dvc.hash']}")
        else:
            print("\n".join(registry.table()))
    return 0


def tracking_target(root: Path) -> Target:
    """The tracking server, asked once: it must answer here. Raises RegistryError."""
    from mlflow.exceptions import MlflowException

    target = Target(root)
    try:
        _ = target.experiment
    except MlflowException as error:
        first = short(error)
        raise RegistryError(f"tracking at {redact(target.uri)} does not answer ({first})") from None
    return target


if __name__ == "__main__":
    sys.exit(main())
