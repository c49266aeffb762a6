"""dvc.lock entries on their way from the worker that made them to the repository.

An entry is the unit of result: command, hashes of what was read, parameters, hashes of what was made. It
travels as the rows of a table artifact, so that it can be read in the Prefect page as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.plan import LOCK_FILE, inconsistencies, read_lock

Entry = Mapping[str, Any]
Row = dict[str, Any]


class LockError(RuntimeError):
    """Entries that do not fit together, or rows that are no entry."""


def to_rows(entry: Entry) -> list[Row]:
    """One row for the command, one for each input, parameter file and output."""
    rows: list[Row] = [{"part": "cmd", "name": entry["cmd"], "value": {}}]
    for part in ("deps", "outs"):
        rows += [{"part": part, "name": item["path"], "value": dict(item)} for item in entry.get(part, [])]
    rows += [
        {"part": "params", "name": file, "value": dict(values)}
        for file, values in entry.get("params", {}).items()
    ]
    return rows


def from_rows(rows: Iterable[Row]) -> dict[str, Any]:
    """The entry, in the order in which DVC writes it. Raises LockError for rows that are none."""
    try:
        entry: dict[str, Any] = {}
        for row in rows:
            if row["part"] == "cmd":
                entry["cmd"] = row["name"]
            elif row["part"] == "params":
                entry.setdefault("params", {})[row["name"]] = row["value"]
            else:
                entry.setdefault(row["part"], []).append(row["value"])
    except (KeyError, TypeError) as error:
        raise LockError(f"a result cannot be read: {error}") from error
    if "cmd" not in entry:
        raise LockError("a result holds no command")
    return {part: entry[part] for part in ("cmd", "deps", "params", "outs") if part in entry}


def merge(root: Path, entries: Mapping[str, Entry], names: Sequence[str] | None = None) -> None:
    """Put `entries` into dvc.lock, written as DVC writes it.

    Raises LockError, and leaves the file as it was, if one of `names` (default: the stages of `entries`) then
    was made from another input than the one that its upstream stage made.
    """
    from dvc.utils.serialize import dump_yaml

    lock = read_lock(root) | {name: _plain(entry) for name, entry in entries.items()}
    checked = set(entries if names is None else names)
    wrong = [words for words in inconsistencies(lock) if words.split(" ", 1)[0] in checked]
    if wrong:
        raise LockError("; ".join(wrong))
    aside = root / f".{LOCK_FILE}.new"
    dump_yaml(str(aside), {"schema": "2.0", "stages": lock})
    aside.replace(root / LOCK_FILE)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
