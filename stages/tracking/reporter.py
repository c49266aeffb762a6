"""The Reporter that a stage hands to the library: everything goes to the run's local record at once.

Names of metrics are free; values that are not finite are left out and counted in `dropped`. On a resume the
steps that were already recorded are not recorded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import hashlib
from itertools import chain
from pathlib import Path
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from paravt.reporter import finite
from paravt.rollout import Rollout, Sample
from stages.params import canonical, flatten
from stages.redact import redact
from stages.scratch import Scratch
from stages.tracking import cost, spans
from stages.tracking.journal import Journal

if TYPE_CHECKING:
    from stages.tracking.sink import Sender

LONG_VALUE = 500
TRACES_A_CALL = 2
EVERY_CALL, THEN_EACH = 4, 10  # traces from the first calls, then from each tenth
MOST_TRACES = 24
PROGRESS_S = 10.0


class StageReporter:
    """Fills a journal; see `paravt.reporter.Reporter` for the three calls that the library makes.

    `scratch.folder` is where the stage keeps what it needs to go on after a kill.
    """

    def __init__(self, journal: Journal, name: str, scratch: Scratch) -> None:
        self.name = name
        self.scratch = scratch
        self.sender: Sender | None = None
        self.dropped: Counter[str] = Counter()
        self._journal = journal
        self._samples: dict[str, Sample] = {}
        self._calls = 0
        self._traces = 0
        self._told_step: int | None = None  # the trainer has told what its episodes cost
        self._shown = 0.0
        self._guard = threading.Lock()
        # what an earlier attempt of this run recorded: its newest step by metric
        self._recorded: dict[str, int] = {}
        for event, _ in journal.events():
            if event["kind"] == "metrics":
                for metric in event["values"]:
                    self._recorded[metric] = max(event["step"], self._recorded.get(metric, event["step"]))

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        if cost.EVERY_STEP in values:
            self._told_step = step
        kept = finite(values, self.dropped)
        kept = {name: value for name, value in kept.items() if step > self._recorded.get(name, step - 1)}
        self._record(kept, step)

    def run_id(self, timeout_s: float) -> str | None:
        """The id of the run, as soon as tracking has given one; None if it does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (self.sender and self.sender.error):
            if found := self._journal.sent.get("run_id"):
                return found
            time.sleep(0.1)
        return self._journal.sent.get("run_id")

    def newest(self, metric: str) -> int:
        """The newest step that an earlier attempt recorded for `metric`, -1 if none."""
        return self._recorded.get(metric, -1)

    def summary(self, values: Mapping[str, float | None]) -> None:
        """Figures of the whole stage; they stand at step 0."""
        self._record(finite(values, self.dropped), 0)

    def rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Counts what they cost, and keeps a few as traces: from the first calls, then from each tenth."""
        if step != self._told_step:
            self._journal.append("spent", values=cost.of_rollouts(rollouts))
        with self._guard:
            self._calls += 1
            wanted = self._calls <= EVERY_CALL or self._calls % THEN_EACH == 0
            count = min(TRACES_A_CALL, MOST_TRACES - self._traces) if wanted else 0
            chosen = spans.choose(rollouts, count)
            self._traces += len(chosen)
        for rollout in chosen:
            tree = spans.episode(rollout, self._samples.get(rollout.sample_id), step)
            self._journal.append("trace", tree=tree, began=time.time() - tree["end_s"])
        self._wake()

    def know(self, samples: Iterable[Sample]) -> None:
        """Samples whose questions and right answers are to stand in the traces."""
        self._samples |= {sample.id: sample for sample in samples}

    def progress(self, done: int, total: int, note: str = "") -> None:
        """A bar that is written over on a terminal; elsewhere a line each ten seconds and at the end."""
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if terminal and _others_draw():
            return
        if done < total and now - self._shown < (0.1 if terminal else PROGRESS_S):
            return
        self._shown = now
        share = min(1.0, done / total) if total else 1.0
        line = f"{self.name} [{'#' * round(24 * share):<24}] {done}/{total} {note}".rstrip()
        if terminal:
            print(f"\r\x1b[2K{line}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def params(self, values: Mapping[str, Any]) -> None:
        """Nested values as flat parameters; a long one goes to an artifact and leaves its hash."""
        flat = {}
        for name, value in flatten(values):
            text = canonical(value)
            if len(text) > LONG_VALUE:
                self.text(text, f"{name}.txt", "params")
                mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
                text = f"sha256 {mark}, {len(text)} characters, see artifact params/{name}.txt"
            flat[name] = text
        self._journal.append("params", values=flat)
        self._wake()

    def tags(self, values: Mapping[str, Any]) -> None:
        self._journal.append("tags", values={name: canonical(value) for name, value in values.items()})
        self._wake()

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """A file or folder (a plot, a report, Data Docs) kept with the run; copied now, sent later."""
        self._journal.append("artifact", file=self._journal.keep(Path(path)), folder=folder)
        self._wake()

    def plots(self, paths: Iterable[str | Path]) -> None:
        """Images, kept under `plots/`."""
        for path in paths:
            self.artifact(path, "plots")

    def text(self, text: str, name: str, folder: str = "") -> None:
        """A text kept with the run as a file called `name`."""
        aside = self._journal.folder / "files" / f"{time.time_ns()}" / name
        aside.parent.mkdir(parents=True)
        aside.write_text(redact(text), encoding="utf-8", errors="surrogatepass")
        inside = aside.relative_to(self._journal.folder).as_posix()
        self._journal.append("artifact", file=inside, folder=folder)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> None:
        """A table kept with the run as `name` (ends in .json), as `mlflow.log_table` writes it."""
        self._journal.append("table", columns=list(columns), rows=[list(row) for row in rows], name=name)
        self._wake()

    def costs(self) -> None:
        """Record what the run has cost so far, all attempts together; see `stages.tracking.cost`."""
        events = (event for event, _ in self._journal.events())
        now = {"kind": "now", "time": time.time()}
        self._record(cost.cost(chain(events, [now]), cost.gpus_used()), 0)

    def dataset(self, path: str, dvc_hash: str, role: str) -> None:
        """Data that the run read (`role`: training, evaluation, ...), by path and DVC hash."""
        self._journal.append("dataset", path=path, hash=dvc_hash, role=role)

    def model(self, name: str, path: str, dvc_hash: str) -> None:
        """Weights that the run made, by reference: DVC holds the bytes."""
        self._journal.append("model", name=name, path=path, hash=dvc_hash)

    def _wake(self) -> None:
        if self.sender:
            self.sender.wake()

    def _record(self, values: Mapping[str, float], step: int) -> None:
        if values:
            self._journal.append("metrics", step=step, values=dict(values))
            self._wake()


def _others_draw() -> bool:
    """True while the library shows a progress bar of its own."""
    tqdm = sys.modules.get("tqdm")
    return bool(tqdm and getattr(tqdm.tqdm, "_instances", None))
