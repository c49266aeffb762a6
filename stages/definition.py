"""What dvc.yaml says of a stage, and the hash of what it stands on.

    fingerprint = H(cmd, DVC hash of each dependency, values of its params groups)

Two runs with the same fingerprint compute the same thing; `.scratch/<fingerprint>` holds what one needs to
go on where the other was stopped. Hashes are DVC's own (MD5 of a file; MD5 of the sorted listing of a
folder, with `.dir`), so that a run can be found by the hash that dvc.lock shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
import hashlib
from itertools import product
import json
from pathlib import Path
import re
from typing import Any

from stages.params import PARAMS_FILE, ROOT, ParamsError, digest, read_yaml

IGNORED = {"__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}  # as .dvcignore says


@dataclass(frozen=True)
class Definition:
    """One stage of dvc.yaml, matrix items resolved: `evaluate@sft`."""

    name: str
    cmd: str
    deps: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[str, ...]


def definitions(root: Path = ROOT) -> dict[str, Definition]:
    """All stages by name. Raises ParamsError if dvc.yaml is missing or not YAML."""
    data = read_yaml(root / "dvc.yaml")
    params = read_yaml(root / PARAMS_FILE) if (root / PARAMS_FILE).exists() else {}
    found = {}
    for name, stage in (data.get("stages") or {}).items():
        for suffix, item in _items(stage.get("matrix")):
            fill = _filler({**params, "item": item})
            found[f"{name}{suffix}"] = Definition(
                f"{name}{suffix}",
                fill(" ".join(str(stage["cmd"]).split())),
                tuple(fill(_path(dep)) for dep in stage.get("deps", [])),
                tuple(group for entry in stage.get("params", []) for group in _groups(entry)),
                tuple(fill(_path(out)) for out in stage.get("outs", [])),
            )
    return found


def definition(name: str, root: Path = ROOT) -> Definition:
    """The stage called `name`. Raises ParamsError if dvc.yaml has none of that name."""
    known = definitions(root)
    if name not in known:
        raise ParamsError(f"dvc.yaml has no stage {name!r}; it has {', '.join(known)}")
    return known[name]


def fingerprint(stage: Definition, params: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """16 hex digits. `params` is params.yaml as a mapping, `hashes` the DVC hash of each dependency."""
    values = {group: _value(params, group) for group in stage.params}
    return digest(stage.cmd, values, {dep: hashes.get(dep) for dep in stage.deps})


def dvc_hash(path: Path) -> str | None:
    """DVC's hash of a file or folder, None if nothing is there."""
    if path.is_file():
        return _md5(path)
    if not path.is_dir():
        return None
    entries = [
        {"md5": _md5(file), "relpath": file.relative_to(path).as_posix()} for file in sorted(_files(path))
    ]
    entries.sort(key=lambda entry: entry["relpath"])
    return (
        hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"
    )


def hash_all(paths: tuple[str, ...], root: Path = ROOT) -> dict[str, str]:
    """DVC hash by path, for those paths that exist."""
    hashes = {path: dvc_hash(root / path) for path in paths}
    return {path: value for path, value in hashes.items() if value is not None}


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in IGNORED:
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _items(matrix: Mapping[str, list] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """`("", {})` without a matrix, else `("@sft", {"model": "sft"})` and so on, named as DVC names them."""
    if not matrix:
        yield "", {}
        return
    for values in product(*matrix.values()):
        yield "@" + "-".join(str(value) for value in values), dict(zip(matrix, values, strict=True))


def _filler(values: Mapping[str, Any]) -> Callable[[str], str]:
    """Puts values of params.yaml and of the matrix item in the place of `${base_model}`, `${item.model}`."""
    return lambda text: re.sub(r"\$\{\s*([\w.]+)\s*\}", lambda name: str(_value(values, name[1])), text)


def _path(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def _groups(entry: str | Mapping[str, list]) -> Iterator[str]:
    """Params of params.yaml: `seed` or `{params.yaml: [seed]}`."""
    if isinstance(entry, str):
        yield entry
    else:
        yield from (group for groups in entry.values() for group in groups)


def _value(params: Mapping[str, Any], dotted: str) -> Any:
    value: Any = params
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
