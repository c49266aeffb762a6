"""What a checkout offers to the registry: weights by hash, with the evaluation that was made of them.

dvc.lock says what belongs together. Results of other weights, or results that were changed since, are
refused. `fetch` is the way back: the weights of a registered version, from DVC's cache or remote, by their
hash alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
import subprocess
import sys
from typing import Any

from stages import params as parameters
from stages.definition import dvc_hash
from stages.params import read_yaml
from stages.redact import redact
from stages.tracking import git

START = {"para_grpo": "sft", "sft": "base", "base": None}  # what a model was trained from
PREPARED, NEEDLES = "data/prepared", "data/needles"
QUESTIONS = f"{PREPARED}/eval.jsonl"
RESULTS = "results.jsonl"


class RegistryError(RuntimeError):
    """What was asked cannot be done; the message says what to do."""


@dataclass(frozen=True)
class Candidate:
    """A model of this checkout with its evaluation; `start` are the results of what it was trained from.

    `inputs` are the data that the evaluation read, as DVC hash by path; `protocol` is how it asked.
    """

    name: str
    path: str
    dvc_hash: str
    questions: str
    results: Path
    start: Path | None
    inputs: Mapping[str, str]
    protocol: str


def candidate(root: Path, name: str) -> Candidate:
    """What dvc.lock says of models/NAME and its evaluation.

    Raises RegistryError if they are not here or do not belong together.
    """
    lock_file = root / "dvc.lock"
    lock = read_yaml(lock_file).get("stages", {}) if lock_file.exists() else {}
    results, start = _evaluation(root, lock, name), START.get(name)
    path = f"models/{name}"
    hashes = _read_by(lock, f"evaluate@{name}")
    made = {out["path"]: out["md5"] for stage in lock.values() for out in stage.get("outs", [])}
    if hashes.get(path) != made.get(path):
        raise RegistryError(f"reports/evaluate/{name} is of another {path}; run `dvc repro evaluate@{name}`")
    prepared = hashes.get(PREPARED)
    if prepared != dvc_hash(root / PREPARED):
        raise RegistryError(
            f"reports/evaluate/{name} answered other questions than {PREPARED} holds; run `dvc repro "
            f"evaluate@{name}`, or `dvc pull {PREPARED}` if another machine made it"
        )
    questions = dvc_hash(root / QUESTIONS)
    if questions is None:
        raise RegistryError(f"{QUESTIONS} is missing; run `dvc pull data/prepared` or `make repro`")
    known = f"evaluate@{start}" in lock if start else False
    if known:
        theirs, trained_from = _read_by(lock, f"evaluate@{start}"), _read_by(lock, name)
        other = trained_from.get(f"models/{start}") not in (None, theirs.get(f"models/{start}"))
        other |= any(theirs.get(path) != hashes.get(path) for path in (PREPARED, NEEDLES))
        if other or _protocol(lock, start) != _protocol(lock, name):
            raise RegistryError(
                f"reports/evaluate/{start} is of another models/{start} or of other questions or settings; "
                f"run `dvc repro evaluate@{start}`"
            )
    return Candidate(
        name,
        path,
        hashes[path],
        questions,
        results,
        _evaluation(root, lock, start) if known else None,
        {where: value for where, value in hashes.items() if where.startswith("data/")},
        _protocol(lock, name),
    )


def _read_by(lock: Mapping[str, Any], stage: str) -> dict[str, str]:
    """What a stage read, as DVC hash by path."""
    return {dep["path"]: dep["md5"] for dep in lock.get(stage, {}).get("deps", [])}


def _protocol(lock: Mapping[str, Any], name: str) -> str:
    """The hash of what shapes an answer and its score beside model, question, frame budget and temperature.

    Seed and engine are not in it: they draw other samples from the same distribution.
    """
    values = lock.get(f"evaluate@{name}", {}).get("params", {}).get(parameters.PARAMS_FILE, {})
    episode, visual, reward = (values.get(group, {}) for group in ("episode", "visual", "reward"))
    return parameters.digest(
        {key: value for key, value in episode.items() if key != "temperature"},
        {key: value for key, value in visual.items() if key != "read_timeout_s"},
        {key: reward.get(key) for key in ("open_ended", "judge_model")},
    )


def _evaluation(root: Path, lock: Mapping[str, Any], name: str) -> Path:
    """The results file of models/NAME, checked against dvc.lock."""
    folder = root / "reports" / "evaluate" / name
    outs = lock.get(f"evaluate@{name}", {}).get("outs", [])
    if not outs or dvc_hash(folder) != outs[0]["md5"]:
        raise RegistryError(
            f"dvc.lock has no evaluation of models/{name} that is here; run `dvc repro evaluate@{name}`, or "
            f"`dvc pull evaluate@{name}` if another machine made it"
        )
    return folder / RESULTS


def tags_of(params: parameters.Params, root: Path) -> dict[str, str]:
    """Tags of a version that come from this checkout."""
    values = {"scale": params.scale, "method": params.method, "seed": str(params.seed)}
    commit = git(root, "rev-parse", "HEAD")
    return values | ({"git.sha": commit} if commit else {})


def fetch(root: Path, value: str, folder: Path) -> None:
    """What DVC's cache or remote has under a hash (`dvc.hash` of a version), as `folder`.

    Raises RegistryError.
    """
    if folder.exists():
        raise RegistryError(f"{folder} is there already; remove it or name another folder")
    pointer = root / f"{folder}.dvc"
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text(f"outs:\n- md5: {value}\n  hash: md5\n  path: {folder.name}\n", encoding="utf-8")
    try:
        for words in (["checkout"], ["pull"]):
            done = subprocess.run(
                [sys.executable, "-m", "dvc", *words, str(pointer)],
                cwd=root,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0 and dvc_hash(root / folder) == value:
                return
    finally:
        pointer.unlink()
    last = (done.stderr.strip() or "no reason given").splitlines()[-1]
    raise RegistryError(f"{value} is in no cache or remote that answers: {redact(last)}")
