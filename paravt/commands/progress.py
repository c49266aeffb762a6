"""How far a long command is, on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paravt.rollout import Rollout

EVERY_S = 30.0


class Progress:
    """A Reporter. Whole episodes are appended to `rollouts_file` as they end, if one is given."""

    def __init__(self, rollouts_file: Path | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.rollouts_file = rollouts_file
        self.terminal = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=Console(stderr=True), disable=not self.terminal)
        self._tasks: dict[str, int] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._said_at = 0.0

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        """Rates are for those who keep them."""

    def rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        if self.rollouts_file is None:
            return
        self.rollouts_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.rollouts_file, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(rollout.to_json(), ensure_ascii=False) + "\n" for rollout in rollouts)

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self.terminal:
            if note not in self._tasks:
                self._tasks[note] = self._bars.add_task(note, total=total)
            self._bars.update(self._tasks[note], completed=done, total=total)
            return
        now = time.monotonic()
        began_s, before = self._began.setdefault(note, (now, done))
        if done < total and now - self._said_at < EVERY_S:
            return
        self._said_at = now
        rest_s = (now - began_s) / (done - before) * (total - done) if done > before else 0.0
        left = f", about {rest_s / 60:.0f} min left" if rest_s > 60 else ""
        print(f"{note}: {done} of {total}{left}", file=sys.stderr)
