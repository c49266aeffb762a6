"""What this machine has, what each scale needs of it, and how a scale would lie on given GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import metadata
import json
import os
from pathlib import Path
import platform
import shutil
import subprocess
import sys

from ruamel.yaml import YAML

from paravt.config import Params

GIB = 2**30
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "decord",
    "av",
    "numpy",
    "pandas",
    "great-expectations",
    "dvc",
    "mlflow",
    "prefect",
)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    """Cores and memory are those that this process may use, limits of a container included."""

    cores: int
    memory_gib: float | None
    disk_free_gib: float
    gpus: tuple[Gpu, ...] = ()
    python: str = ""
    system: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """What a scale needs. Figures of `paravt_8b` are those of its sources, not measured by this project."""

    name: str
    cores: int
    memory_gib: float
    disk_gib: float
    gpus: int = 0
    gpu_memory_gib: float = 0.0
    note: str = ""


SCALES = (
    Scale("smoke", 2, 8, 6, note="two steps a stage; the whole pipeline in about a minute"),
    Scale("tiny", 2, 8, 6, note="the whole pipeline in about a quarter of an hour"),
    Scale(
        "paravt_8b",
        32,
        256,
        2000,
        8,
        74.0,
        note="estimates, not measured; disk holds weights, checkpoints, training media, benchmarks",
    ),
)


def inspect(folder: str | Path = ".") -> Machine:
    """This machine; disk is the free space under `folder`."""
    return Machine(
        cores=_cores(),
        memory_gib=_memory_gib(),
        disk_free_gib=round(shutil.disk_usage(folder).free / GIB, 1),
        gpus=_gpus(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
    )


def lacks(machine: Machine, scale: Scale) -> list[str]:
    """What the machine lacks for a scale, one phrase each; empty if it has everything."""
    found = []
    if machine.cores < scale.cores:
        found.append(f"{scale.cores} cores (has {machine.cores})")
    if machine.memory_gib is not None and machine.memory_gib < scale.memory_gib * 0.95:
        found.append(f"{scale.memory_gib:g} GiB memory (has {machine.memory_gib:g})")
    if machine.disk_free_gib < scale.disk_gib:
        found.append(f"{scale.disk_gib:g} GiB free disk (has {machine.disk_free_gib:g})")
    fitting = sum(gpu.memory_gib >= scale.gpu_memory_gib for gpu in machine.gpus)
    if fitting < scale.gpus:
        found.append(f"{scale.gpus} GPUs of {scale.gpu_memory_gib:g} GiB or more (has {fitting})")
    return found


def composed(*choices: str) -> Params:
    """The parameters that conf/ gives for `scale=paravt_8b`, `layout=8x80` and the like, from the repository
    root. Raises ValueError with the sentence of the pipeline that composes them.
    """
    command = [sys.executable, "-m", "stages.params", "--show", *choices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["nothing was said"]
        raise ValueError(f"{' '.join(choices)} cannot be composed: {words[-1]}")
    values = YAML(typ="safe", pure=True).load(done.stdout)
    return Params.model_validate_json(json.dumps(values))


def to_json(machine: Machine) -> dict:
    """Machine and scales, for other programs."""
    scales = {
        scale.name: {
            "needs": asdict(scale),
            "lacks": lacks(machine, scale),
            "fits": not lacks(machine, scale),
        }
        for scale in SCALES
    }
    return {"machine": asdict(machine), "scales": scales}


def describe(machine: Machine) -> str:
    """The same for a person."""
    memory = "unknown" if machine.memory_gib is None else f"{machine.memory_gib:g} GiB"
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_gib:g} GiB)" for gpu in machine.gpus) or "none"
    lines = [
        f"system   {machine.system}, Python {machine.python}",
        f"cores    {machine.cores}",
        f"memory   {memory}",
        f"disk     {machine.disk_free_gib:g} GiB free here",
        f"gpus     {gpus}",
        "",
        *(f"{name:19}{version or 'not installed'}" for name, version in machine.packages.items()),
        "",
    ]
    for scale in SCALES:
        missing = lacks(machine, scale)
        state = "this machine fits" if not missing else f"lacks {', '.join(missing)}"
        gpus = f", {scale.gpus} GPUs of {scale.gpu_memory_gib:g} GiB" if scale.gpus else ""
        lines.append(
            f"{scale.name}: needs {scale.cores} cores, {scale.memory_gib:g} GiB memory, "
            f"{scale.disk_gib:g} GiB disk{gpus}; {state}. ({scale.note})"
        )
    return "\n".join(lines)


def _cores() -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        allowed = os.cpu_count() or 1
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        allowed = min(allowed, max(1, int(words[0]) // int(words[1])))
    return allowed


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return round(min(total, int(limit)) / GIB if limit.isdigit() else total / GIB, 1)


def _gpus() -> tuple[Gpu, ...]:
    """As nvidia-smi lists them; none if it is not there. No CUDA context is opened."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if done.returncode == 0]
    return tuple(
        Gpu(row[0].strip(), round(float(row[1]) / 1024, 1))
        for row in rows
        if len(row) == 2 and row[1].strip().isdigit()
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
