"""From the local record to MLflow: each event is sent once, in order, whenever the server answers.

`drain` sends what is new and remembers how far it came. `Sender` does so in a thread while a stage works.
`settle` closes the runs of processes that are gone (KILLED) and sends what they left.
"""

from __future__ import annotations

from collections.abc import Iterator
import logging
from pathlib import Path
import re
import threading
from typing import Any

from stages.redact import redact, short
from stages.tracking.events import apply
from stages.tracking.journal import Journal, abandoned
from stages.tracking.target import Target, tracking_uri

log = logging.getLogger("paravt.tracking")

BATCH = 900  # MLflow takes 1000 metrics a call
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
# MLflow calls a store that cannot keep up a bad request as well: that passes
BUSY = re.compile(
    r"QueuePool|database is locked|OperationalError|deadlock|too many (clients|connections)", re.I
)
RETRY_S = (2.0, 5.0, 15.0, 30.0)


def drain(journal: Journal, target: Target) -> None:
    """Send every event that is not sent yet. Raises what MLflow raises; what was sent stays sent.

    Without a start that can be read there is no run: what stands before one is passed over, and logged.
    """
    from mlflow.exceptions import MlflowException

    state = journal.sent
    if state.get("uri") != target.uri:
        state = {"uri": target.uri, "offset": 0}
    runless = 0
    for event, offset in _joined(journal, state["offset"]):
        try:
            if "run_id" in state or event["kind"] == "start":
                apply(event, state, journal.folder, target)
            else:
                runless += 1
        except MlflowException as error:
            if event["kind"] == "start" or error.error_code not in REFUSALS or BUSY.search(str(error)):
                raise
            # a later try would be refused as well, and must not keep back what follows
            log.warning("tracking refused %s: %s", event["kind"], short(error))
        state["offset"] = offset
        journal.mark_sent(state)
    if runless:
        log.warning("%s: %d events belong to no run; its start was lost", journal.folder.name, runless)


def settle(root: Path, target: Target | None = None) -> dict[str, str]:
    """Close the runs of dead processes as KILLED and send what waits; returns the status by record name.

    Raises what MLflow raises if it does not answer.
    """
    closed = {}
    home = root / ".scratch" / "tracking"
    if target is None and any(home.glob("*/events.jsonl")):
        target = Target(root)  # takes seconds, in which no record need be locked
    for journal in abandoned(home):
        try:
            status = last = None
            for event, _ in journal.events():
                last = event["time"]
                status = event["status"] if event["kind"] == "end" else status
                status = None if event["kind"] == "start" else status
            if status is None and last is not None:
                journal.append("end", status="KILLED", ended=last)
                status = "KILLED"
            if last is not None:
                drain(journal, target or Target(root))
            closed[journal.folder.name] = status or "empty"
            if status in (None, "FINISHED"):
                journal.delete()
        finally:
            journal.release()
    return closed


class Sender:
    """Sends a journal's events from a thread. Never raises, never holds the stage up."""

    def __init__(self, journal: Journal, root: Path) -> None:
        self._journal = journal
        self._root = root
        self._news = threading.Event()
        self._stop = threading.Event()
        self._done = threading.Event()
        self.error: str | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="tracking")
        self._thread.start()

    def wake(self) -> None:
        self._news.set()

    def finish(self, timeout_s: float) -> bool:
        """Send the rest, within `timeout_s`; True if everything has been sent."""
        self._stop.set()
        self._news.set()
        return self._done.wait(timeout_s) and self.error is None

    def _work(self) -> None:
        target: Target | None = None
        swept = False
        failures = 0
        while True:
            stopping = self._stop.is_set()
            self._news.clear()
            try:
                target = target or Target(self._root)
                drain(self._journal, target)
                if not swept:
                    settle(self._root, target)
                    swept = True
                if failures:
                    log.warning("tracking answers again; nothing was lost")
                failures, self.error = 0, None
            except Exception as error:  # worker boundary: tracking must never stop the work
                if failures == 0:
                    log.warning(
                        "tracking at %s does not answer (%s); metrics are kept in %s and sent later",
                        redact(target.uri if target else tracking_uri(self._root)),
                        short(error),
                        self._journal.folder,
                    )
                failures += 1
                self.error = short(error)
            if stopping:
                self._done.set()
                return
            if failures:
                self._stop.wait(RETRY_S[min(failures, len(RETRY_S)) - 1])
            else:
                self._news.wait(5.0)
                self._stop.wait(0.2)  # let a few events gather


def _joined(journal: Journal, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Events from `offset`, neighbouring metric events joined into one; each with the offset that follows."""
    held: list[dict[str, Any]] = []
    end = offset
    for event, following in journal.events(offset):
        count = sum(len(item["values"]) for item in held)
        if held and (event["kind"] != "metrics" or count + len(event["values"]) > BATCH):
            yield {"kind": "metrics", "steps": held}, end
            held = []
        if event["kind"] == "metrics":
            held.append(event)
        else:
            yield event, following
        end = following
    if held:
        yield {"kind": "metrics", "steps": held}, end
