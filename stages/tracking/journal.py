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
from contextlib import suppress
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

SWEEPS = "sweeps"  # stands in the lock of one who only sends what a dead process left
POLL_S = 0.1

_held: dict[Path, str] = {}  # by whom: a record lock does not keep its own process out
_held_guard = threading.Lock()


class Busy(RuntimeError):
    """The record is held by a living process."""


class Swept(Busy):
    """The record is held for a while only: what an earlier attempt left is being sent."""


class Journal:
    """One run's record. Use `open` to write it, `abandoned` to find those whose writers are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock_file: Any = None
        self._append_guard = threading.Lock()
        self._complained = False
        self._unreadable: set[int] = set()  # where these lines begin

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    def acquire(self, patience_s: float = 0.0, sweeps: bool = False) -> Journal:
        """Take the lock, in order to write or, with `sweeps`, to send what is left.

        Raises Busy naming the process that holds it; one that sweeps is waited for, `patience_s` at most.
        """
        deadline, told = time.monotonic() + patience_s, False
        while True:
            try:
                return self._take(f"{os.getpid()} {SWEEPS if sweeps else ''}".strip())
            except Swept as busy:
                if time.monotonic() >= deadline:
                    raise
                if not told:
                    log.warning("%s; waiting for that, up to %g s", busy, patience_s)
                told = True
                time.sleep(POLL_S)

    def _take(self, owner: str) -> Journal:
        with _held_guard:
            if self.folder in _held:
                raise self._busy(_held[self.folder])
            file = self._locked_file()
            _held[self.folder] = owner
        file.truncate(0)
        file.write(f"{owner}\n")
        file.flush()
        self._lock_file = file
        self._repair()
        return self

    def _busy(self, owner: str) -> Busy:
        number, _, what = owner.partition(" ")
        name = self.folder.name
        if what == SWEEPS:
            return Swept(f"{name}: process {number} is sending what an earlier attempt left")
        if not number or (number.isdigit() and not _lives(int(number))):  # the next owner has not yet signed
            return Swept(f"{name} has just been taken by another process")
        return Busy(f"{name} is already running (process {number}); wait for it or end it")

    def _locked_file(self) -> Any:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "lock"
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().strip()
                file.close()
                raise self._busy(owner) from None
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
            file.close()  # the record was deleted in between; begin a new one

    def release(self) -> None:
        if self._lock_file is not None:
            with _held_guard:
                self._lock_file.close()
                self._lock_file = None
                _held.pop(self.folder, None)

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event without secrets; it is with the operating system when this returns."""
        event = {"kind": kind, "time": time.time(), **redact_all(fields)}
        line = json.dumps(event, ensure_ascii=False) + "\n"
        with self._append_guard:
            whole = None
            try:
                with open(self.events_file, "ab") as file:
                    whole = file.tell()
                    file.write(line.encode("utf-8", "surrogatepass"))
            except OSError as error:  # a full disk stops the work where it saves, not where it reports
                if whole is not None:
                    self._cut(whole)
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
        """Events from byte `offset`, each with the offset that follows it. Lines that cannot be read are
        passed over, counted in the log.
        """
        if not self.events_file.exists():
            return
        with open(self.events_file, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # being written
                began, offset = offset, offset + len(line)
                try:
                    event = json.loads(line.decode("utf-8", "surrogatepass"))
                except ValueError:
                    self._pass_over(began)
                    continue
                yield event, offset

    def _pass_over(self, began: int) -> None:
        if began not in self._unreadable:  # a record is read many times
            self._unreadable.add(began)
            count = len(self._unreadable)
            log.warning("%s: unreadable events are passed over, %d so far", self.events_file, count)

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

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _cut(self, whole: int) -> None:
        """Take away what a failed write left behind `whole` bytes: the next line would be joined to it."""
        with suppress(OSError), open(self.events_file, "r+b") as file:  # else it is passed over in reading
            file.seek(whole)
            if not file.read().endswith(b"\n"):
                file.truncate(whole)

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
            yield journal.acquire(sweeps=True)
        except Busy:
            continue


def _lives(number: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True
