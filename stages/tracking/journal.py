"""The local record of a run: every event is on disk before anything is sent.

    .scratch/tracking/<key>/
        events.jsonl    one event a line, in order
        sent.json       the run id, and how far the events have been sent
        files/          copies of artifacts that wait to be sent
        lock            held by the process that writes; a dead process holds nothing

Tracking is a reader of this record: it may be away, slow or started later, and a run that was killed is found
by its free lock.
"""

from __future__ import annotations

from collections.abc import Iterator
import fcntl
import json
import logging
import os
from pathlib import Path
import shutil
import threading
import time
from typing import Any

from stages.redact import redact_all, redact_file

log = logging.getLogger("paravt.tracking")

_held: set[Path] = set()  # a record lock does not keep its own process out
_held_guard = threading.Lock()


class Busy(RuntimeError):
    """The record is held by a living process."""


class Journal:
    """One run's record. Use `open` to write it, `abandoned` to find those whose writers are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock_file: Any = None
        self._append_guard = threading.Lock()
        self._complained = False

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    def acquire(self) -> Journal:
        """Take the lock. Raises Busy naming the process that holds it."""
        with _held_guard:
            if self.folder in _held:
                raise Busy(f"{self.folder.name} is already running in this process")
            file = self._locked_file()
            _held.add(self.folder)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock_file = file
        self._repair()
        return self

    def _locked_file(self) -> Any:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "lock"
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                file.close()
                raise Busy(
                    f"{self.folder.name} is already running (process {owner}); wait for it or end it"
                ) from None
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
            file.close()  # the record was deleted in between; begin a new one

    def release(self) -> None:
        if self._lock_file is not None:
            with _held_guard:
                self._lock_file.close()
                self._lock_file = None
                _held.discard(self.folder)

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event without secrets; it is with the operating system when this returns."""
        event = {"kind": kind, "time": time.time(), **redact_all(fields)}
        line = json.dumps(event, ensure_ascii=False) + "\n"
        try:
            with self._append_guard, open(self.events_file, "ab") as file:
                file.write(line.encode("utf-8", "surrogatepass"))
        except OSError as error:  # a full disk stops the work where it saves, not where it reports
            if not self._complained:
                log.warning("the record %s cannot be written: %s", self.events_file, error.strerror)
            self._complained = True

    def keep(self, path: Path) -> str:
        """A copy of a file or folder, without secrets, that waits for sending; its name inside the record."""
        target = self.folder / "files" / f"{time.time_ns()}" / path.name
        target.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
        for file in target.rglob("*") if target.is_dir() else [target]:
            if file.is_file():
                redact_file(file)
        return target.relative_to(self.folder).as_posix()

    def events(self, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """Events from byte `offset`, each with the offset that follows it."""
        if not self.events_file.exists():
            return
        with open(self.events_file, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # being written
                offset += len(line)
                yield json.loads(line.decode("utf-8", "surrogatepass")), offset

    @property
    def sent(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "sent.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def mark_sent(self, state: dict[str, Any]) -> None:
        aside = self.folder / "sent.json.new"
        aside.write_text(json.dumps(state), encoding="utf-8")
        aside.replace(self.folder / "sent.json")

    @property
    def last_time(self) -> float:
        """When the last event was written, in seconds since the epoch."""
        return self.events_file.stat().st_mtime if self.events_file.exists() else time.time()

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _repair(self) -> None:
        """Cut a last line that a kill left half written."""
        if self.events_file.exists():
            content = self.events_file.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole != len(content):
                os.truncate(self.events_file, whole)


def abandoned(home: Path) -> Iterator[Journal]:
    """Records under `home` whose writer is gone, locked for the caller, who releases each."""
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if not (folder / "lock").exists():
            continue
        journal = Journal(folder)
        try:
            yield journal.acquire()
        except Busy:
            continue
