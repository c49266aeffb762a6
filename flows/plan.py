"""What has to run, read from DVC: its graph, its status, its lock. No edge is written down a second time.

A stage runs if DVC says that its command, code, parameters or inputs changed, if dvc.lock has no entry for
it, or if the entry names another hash for an input than the stage that makes it; and if something above it
runs. Outputs that are merely absent are no change: they come back from the cache (`restore`), or, where the
cache does not have them, the stage runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.params import read_yaml

if TYPE_CHECKING:
    from dvc.stage import PipelineStage

ABSENT = {"deleted", "not in cache"}
LOCK_FILE, PIPELINE_FILE = "dvc.lock", "dvc.yaml"


class PlanError(RuntimeError):
    """The pipeline cannot be planned; the message says why."""


@dataclass(frozen=True)
class Node:
    """A stage of the root dvc.yaml: the stages it reads from, where it runs, what it makes."""

    name: str
    upstream: tuple[str, ...] = ()
    pool: str = "cpu"
    outs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One stage to be started, and why."""

    node: Node
    action: Literal["run", "restore"]
    reason: str


@dataclass(frozen=True)
class Plan:
    """`graph` in an order in which every stage follows what it reads from; `steps` are those to start."""

    graph: tuple[Node, ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do: all stages are up to date"
        return "\n".join(f"{step.action:<7} {step.node.name}: {step.reason}" for step in self.steps)


def make_plan(root: Path, targets: Sequence[str] = (), data_here: bool = True) -> Plan:
    """The plan for the pipeline at `root`, or for `targets` and what they need.

    A target is a stage name; `evaluate` stands for all of its matrix. Without `data_here` the checkout is not
    expected to hold outputs: absent ones are in the DVC remote. Raises PlanError.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            stages = [stage for stage in repo.index.stages if stage.path_in_repo == PIPELINE_FILE]
            graph = order(_nodes(repo, stages))
            wanted = select(graph, targets)
            by_address = {stage.addressing: stage.name for stage in stages}
            found = repo.status(targets=[stage.addressing for stage in stages if stage.name in wanted])
            status = {by_address[address]: reasons for address, reasons in found.items()}
            absent = {stage.name: _absent(stage) for stage in stages if data_here and stage.name in wanted}
    except DvcException as error:
        raise PlanError(f"DVC cannot read the pipeline: {' '.join(str(error).split())}") from error
    lock = read_lock(root)
    return Plan(graph, steps([node for node in graph if node.name in wanted], status, lock, absent))


def steps(
    graph: Sequence[Node],
    status: Mapping[str, Sequence[Any]],
    lock: Mapping[str, Any],
    absent: Mapping[str, Literal["cached", "lost"] | None],
) -> tuple[Step, ...]:
    """The steps for an ordered `graph`.

    `status` is what `dvc status --json` says by stage, `lock` the stages of dvc.lock, `absent` whether
    outputs are missing from the workspace and then whether the cache has them.
    """
    made = {out["path"]: _hash(out) for entry in lock.values() for out in entry.get("outs", [])}
    running: set[str] = set()
    chosen = []
    for node in graph:
        above = [name for name in node.upstream if name in running]
        action: Literal["run", "restore"] = "run"
        if reason := _changed(node, status.get(node.name, ()), lock.get(node.name), made):
            pass
        elif above:
            reason = f"{', '.join(above)} runs"
        elif absent.get(node.name) == "lost":
            reason = "its outputs are missing, here and in the cache"
        elif absent.get(node.name) == "cached":
            action, reason = "restore", "its outputs are taken from the cache"
        else:
            continue
        chosen.append(Step(node, action, reason))
        if action == "run":
            running.add(node.name)
    return tuple(chosen)


def order(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Upstream first, otherwise as dvc.yaml lists them."""
    left = list(nodes)
    done: list[Node] = []
    while left:
        names = {node.name for node in left}
        ready = next((node for node in left if not names & set(node.upstream)), None)
        if ready is None:
            raise PlanError(f"the stages {', '.join(sorted(names))} wait for each other")
        done.append(ready)
        left.remove(ready)
    return tuple(done)


def select(graph: Sequence[Node], targets: Sequence[str]) -> set[str]:
    """The names of `targets` and of all stages that they need; everything if there are no targets."""
    if not targets:
        return {node.name for node in graph}
    by_name = {node.name: node for node in graph}
    wanted: set[str] = set()
    for target in targets:
        named = [name for name in by_name if target in (name, name.partition("@")[0])]
        if not named:
            raise PlanError(f"there is no stage {target!r}; there are {', '.join(by_name)}")
        waiting = list(named)
        while waiting:
            name = waiting.pop()
            if name not in wanted:
                wanted.add(name)
                waiting.extend(by_name[name].upstream)
    return wanted


def read_lock(root: Path) -> dict[str, Any]:
    """The stages of dvc.lock, empty if there is none yet."""
    path = root / LOCK_FILE
    return (read_yaml(path) or {}).get("stages", {}) if path.exists() else {}


def inconsistencies(lock: Mapping[str, Any]) -> list[str]:
    """One sentence for each input whose recorded hash is not that of the stage which makes it."""
    made = {out["path"]: (name, _hash(out)) for name, entry in lock.items() for out in entry.get("outs", [])}
    return [
        f"{name} was made from another {dep['path']} than the one of {made[dep['path']][0]}"
        for name, entry in lock.items()
        for dep in entry.get("deps", [])
        if dep["path"] in made and made[dep["path"]][1] != _hash(dep)
    ]


def _changed(
    node: Node, reasons: Sequence[Any], entry: Mapping[str, Any] | None, made: Mapping[str, str]
) -> str:
    """Why a stage has changed by itself; empty if it has not."""
    if entry is None:
        return "it has never run"
    words = []
    for reason in reasons:
        if isinstance(reason, str):
            words.append(reason)
            continue
        for kind, paths in reason.items():
            words += [
                _what(kind, path, state) for path, state in paths.items() if not _only_absent(kind, state)
            ]
    for dep in entry.get("deps", []):
        if made.get(dep["path"], _hash(dep)) != _hash(dep):
            words.append(f"{dep['path']} was made anew")
    return ", ".join(dict.fromkeys(words))


def _only_absent(kind: str, state: Any) -> bool:
    return isinstance(state, str) and state in ABSENT and kind in ("changed deps", "changed outs")


def _what(kind: str, path: str, state: Any) -> str:
    if isinstance(state, Mapping):  # params.yaml: {"grpo.steps": "modified"}
        return f"{', '.join(state)} changed"
    return f"{path} is {state}" if kind != "changed command" else kind


def _hash(entry: Mapping[str, Any]) -> str:
    return entry.get("md5") or entry.get("etag") or ""


def _nodes(repo: Any, stages: Sequence[PipelineStage]) -> list[Node]:
    graph = repo.index.graph
    names = {stage: stage.name for stage in stages}
    return [
        Node(
            stage.name,
            tuple(names[other] for other in stages if graph.has_edge(stage, other)),
            (stage.meta or {}).get("pool", "cpu"),
            tuple(out.def_path for out in stage.outs),
        )
        for stage in stages
    ]


def _absent(stage: PipelineStage) -> Literal["cached", "lost"] | None:
    missing = [out for out in stage.outs if not out.exists]
    if not missing:
        return None
    return "lost" if any(out.changed_cache() for out in missing) else "cached"
