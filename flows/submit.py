"""The parent's side: stages sent to the workers of their pools, their results taken in one by one.

A stage is a child flow run under an idempotency key made of the branch, the stage and the entries it stands
on. So a parent that was killed and started again, and a second parent of the same content, meet the child
that is running or has finished instead of starting it twice. Each result is merged, checked and committed at
once: what is finished stays finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import itertools
import threading
import time
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from flows import locks
from flows.clones import Clone
from flows.plan import LOCK_FILE, Node, read_lock
from flows.run_stage import Outcome, StageFailed
from flows.stage import REFUSED, entry_key
from stages.params import digest

POLL_S = 1.0
AWAY_S = 300.0  # how long the Prefect server may be away


class ChildFailed(StageFailed):
    """A stage that did not end well on its worker."""

    def __init__(self, name: str, state: str, message: str, transient: bool) -> None:
        super().__init__(name, 1, f"{name}: {state}: {message}")
        self._transient = transient

    @property
    def transient(self) -> bool:
        return self._transient


@dataclass
class Board:
    """What the parent knows: the branch's clone, the merged lock, the children on their way."""

    clone: Clone
    branch: str
    commit: str
    graph: tuple[Node, ...]
    pipeline_run: str | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _children: set[UUID] = field(default_factory=set)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def above(self, name: str) -> dict[str, Any]:
        """The entries of all stages that `name` stands on, direct or not."""
        nodes = {node.name: node for node in self.graph}
        waiting, wanted = list(nodes[name].upstream), set()
        while waiting:
            upper = waiting.pop()
            if upper not in wanted:
                wanted.add(upper)
                waiting.extend(nodes[upper].upstream)
        with self._guard:
            lock = read_lock(self.clone.root)
        return {node.name: lock[node.name] for node in self.graph if node.name in wanted}

    def take(self, name: str, entry: dict[str, Any]) -> None:
        """Merge a result, check it against its upstream, commit and push it."""
        with self._guard:
            locks.merge(self.clone.root, {name: entry})
            self.clone.commit(self.branch, [LOCK_FILE], f"Result of {name}")

    def run(self, node: Node, line: Callable[[str], None]) -> Outcome:
        """Have a worker of the stage's pool run it. Raises StageFailed."""
        started = time.monotonic()
        with get_client(sync_client=True) as client:
            child = self._child(client, node)
            with self._guard:
                self._children.add(child.id)
            line(f"{node.name}: sent to pool {node.pool} as flow run {child.name}")
            try:
                child = self._wait(client, child)
            finally:
                if not self.stopping.is_set():
                    with self._guard:
                        self._children.discard(child.id)
            state = child.state
            if not state.is_completed():
                again = state.is_crashed() or (state.is_failed() and state.name != REFUSED)
                raise ChildFailed(node.name, state.name, state.message or "no reason given", again)
            rows, description = _artifact(client, child.id, node.name)
        self.take(node.name, locks.from_rows(rows))
        return Outcome(node.name, "which ran" in description, time.monotonic() - started)

    def cancel(self) -> None:
        """Cancel the children that are on their way; Prefect would do so by itself, half a minute later."""
        self.stopping.set()
        with self._guard:
            children = list(self._children)
        with get_client(sync_client=True) as client:
            for child in children:
                client.set_flow_run_state(child, Cancelling(message="the pipeline was stopped"))

    def _child(self, client: SyncPrefectClient, node: Node) -> FlowRun:
        """A new child, or the one of the same content that is running or done."""
        upstream = self.above(node.name)
        content = digest(self.branch, node.name, upstream)
        for attempt in itertools.count():
            run: FlowRun = run_deployment(
                f"stage/{node.pool}",
                parameters={
                    "name": node.name,
                    "commit": self.commit,
                    "upstream": upstream,
                    "pool": node.pool,
                    "pipeline_run": self.pipeline_run,
                },
                flow_run_name=f"{node.name} {content[:6]}" + (f" try {attempt + 1}" if attempt else ""),
                timeout=0,
                idempotency_key=f"{content}-{attempt}",
                tags=[f"stage:{node.name}", self.branch],
            )
            state = self._awake(client, run.id)
            if not state.is_final() or state.is_completed():
                return run
        raise AssertionError("unreachable")

    def _awake(self, client: SyncPrefectClient, run: UUID) -> State:
        """The state of a child, once it is not being cancelled: such a one still works in its clone."""
        while (state := client.read_flow_run(run).state).is_cancelling():
            if self.stopping.wait(POLL_S):
                break
        return state

    def _wait(self, client: SyncPrefectClient, child: FlowRun) -> FlowRun:
        heard = time.monotonic()
        while True:
            if self.stopping.wait(POLL_S):
                raise ChildFailed(child.name, "Cancelled", "the pipeline was stopped", False)
            try:
                child = client.read_flow_run(child.id)
                heard = time.monotonic()
            except httpx.HTTPError as error:
                if time.monotonic() - heard > AWAY_S:
                    raise ChildFailed(child.name, "Lost", f"the server is away: {error}", False) from error
                continue
            if child.state.is_final():
                return child


def _artifact(client: SyncPrefectClient, run: UUID, name: str) -> tuple[list[locks.Row], str]:
    import json

    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run]), key=ArtifactFilterKey(any_=[entry_key(name)])
        )
    )
    if not found:
        raise ChildFailed(name, "Completed", "its result is missing", True)
    data = found[-1].data
    return (json.loads(data) if isinstance(data, str) else data), found[-1].description or ""
