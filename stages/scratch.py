"""Where a stage keeps what it needs to go on after a kill: `.scratch/<fingerprint>`.

DVC deletes the outputs of a stage before it runs, so checkpoints cannot live there. The fingerprint stands
for command, dependencies and parameters: a changed stage starts anew, an unchanged one goes on.

A finished stage leaves its folder to the next stage that starts: until then DVC may not have taken the
outputs yet, and a kill in between costs nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
import shutil

MARK = "stage.json"


class Scratch:
    """The folder of one piece of work under `home`; made when it is first asked for."""

    def __init__(self, home: Path, key: str, name: str) -> None:
        self._folder = home / key
        self._name = name
        for mark in home.glob(f"*/{MARK}"):
            if mark.parent != self._folder and _is_finished(mark):
                shutil.rmtree(mark.parent, ignore_errors=True)

    @property
    def folder(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mark(finished=False)  # also where a run finished before: this one may be killed
        return self._folder

    def finish(self) -> None:
        """Whoever starts next may remove the folder."""
        if self._folder.exists():
            self._mark(finished=True)

    def _mark(self, finished: bool) -> None:
        (self._folder / MARK).write_text(
            json.dumps({"stage": self._name, "finished": finished}) + "\n", encoding="utf-8"
        )


def _is_finished(mark: Path) -> bool:
    try:
        return json.loads(mark.read_text(encoding="utf-8"))["finished"]
    except (OSError, ValueError, KeyError):
        return False
