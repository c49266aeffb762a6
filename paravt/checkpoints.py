"""Checkpoints that are whole or absent.

    root/step-120/            a finished checkpoint
        complete.json         the marker, written last: each file with its size
    root/.writing-step-125    one being written, or left behind by a killed run

A save goes to the side, every file is flushed to the disk, the marker comes last, and one rename publishes
the folder. A kill at any moment therefore leaves the previous checkpoint in place. Steps are compared as
numbers. A folder without its marker, or whose files are not those that the marker names, is passed over with
a sentence; it is neither resumed from nor counted among the checkpoints to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import errno
import json
import logging
import os
from pathlib import Path
import random
import re
import shutil
from typing import IO, Any

log = logging.getLogger("paravt")

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d+)")
_ASIDE = ".writing-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `step` is the number of finished steps."""

    step: int
    folder: Path


def save(root: str | Path, step: int, write: Callable[[Path], None], keep: int) -> Checkpoint:
    """Publish `root/step-<step>` as `write(folder)` fills it, then drop all but the newest `keep`.

    Raises CheckpointError, in one sentence, if the disk does not take it; the earlier checkpoints stay.
    """
    root = Path(root)
    target = root / f"step-{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        publish(target, write, marker=True)
    except OSError as error:
        kept = latest(root)
        stays = f"the one of step {kept.step} is kept" if kept else "there is no earlier one"
        raise CheckpointError(
            f"cannot save the checkpoint of step {step} under {root}: {reason(error)}; {stays}; "
            "make room and run again"
        ) from error
    for old in finished(root)[:-keep]:
        _remove(old.folder)
    return Checkpoint(step, target)


def publish(target: Path, write: Callable[[Path], None], marker: bool = False) -> None:
    """Make folder `target` appear at once, as `write(folder)` fills it; one that is there is replaced.

    Raises what the write or the renaming raised; then the one that was there stays, and nothing half made.
    """
    aside = target.parent / f"{_ASIDE}{target.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if aside.exists():
        shutil.rmtree(aside)
    try:
        aside.mkdir()
        write(aside)
        _seal(aside, marker)
        _swap(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def finished(root: str | Path) -> list[Checkpoint]:
    """The complete checkpoints under `root`, lowest step first; each broken folder is logged."""
    found = []
    for folder in Path(root).glob("step-*"):
        match = _NAME.fullmatch(folder.name)
        if not match or not folder.is_dir():
            continue
        if fault := _fault(folder):
            log.warning("checkpoint %s is passed over: %s", folder, fault)
        else:
            found.append(Checkpoint(int(match[1]), folder))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(root: str | Path) -> Checkpoint | None:
    """The complete checkpoint with the highest step, or None."""
    return (finished(root) or [None])[-1]


def save_tensors(path: Path, state: Any) -> None:
    """`torch.save`, but a disk that is full is an OSError as everywhere else."""
    import torch

    with open(path, "wb") as file:
        watched = _Watched(file)
        try:
            torch.save(state, watched)
        except RuntimeError as error:
            raise (watched.error or error) from error


def load_tensors(path: Path) -> Any:
    """What `save_tensors` wrote, on the CPU. Plain data and tensors only: nothing is executed."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def random_state() -> dict:
    """The state of all generators that training may draw from, as plain data and tensors."""
    import numpy as np
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict) -> None:
    """The inverse of `random_state`."""
    import numpy as np
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


class _Watched:
    """A file that remembers why a write failed: torch's writer raises a RuntimeError without the cause."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _seal(folder: Path, marker: bool) -> None:
    """Flush each file, then write the marker, then flush the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    if marker:
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        with open(folder / MARKER, "w", encoding="utf-8") as file:
            json.dump(sizes, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fault(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint, or None if it is one."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MARKER}, so its writing was never finished"
    except (OSError, ValueError) as error:
        return f"its {MARKER} cannot be read ({error})"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def _swap(aside: Path, target: Path) -> None:
    """Put `aside` in the place of `target`. If that fails, what was there is there again."""
    old = target.parent / f"{_ASIDE}old-{target.name}"
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    try:
        aside.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)  # what stays of it is cleared by the next one


def _remove(folder: Path) -> None:
    """Delete a folder; renamed first, so that a kill half way does not leave a broken checkpoint behind."""
    aside = folder.parent / f"{_ASIDE}old-{folder.name}"
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    shutil.rmtree(aside)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(path)


def reason(error: OSError) -> str:
    """Why a write failed, in a few words."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full" if full else error.strerror or str(error)
