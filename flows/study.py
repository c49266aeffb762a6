"""`make study`: every run of the method study, then its report; see study/dvc.yaml.

    python -m flows.study [--jobs 2] [GROUP ...]

The root pipeline is brought up to date as far as the SFT checkpoint; then each run of the study is one DVC
stage of the project in study/, so what is done is not done again, and a run that was killed goes on from its
checkpoint. Up to `--jobs` runs go side by side. A run that fails does not stop the others; the command then
ends with 1, and the report is made of what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
import sys
import time

from flows.repro import repro
from flows.run_stage import run_dvc, stop_all
from stages import environment
from stages.command import command, fail
from stages.tracking import Stopped
from stages.tracking.lifeline import lifeline

GROUPS = ("start", "main", "variants", "base", "other_start", "other_bases")
HERE = Path("study")


def runs_of(root: Path, groups: Sequence[str]) -> list[str]:
    """The stages of these groups as DVC names them (`main@para_grpo-1`): all arms of a seed, then the next.

    In this order a study that is stopped early has the same seeds of all arms.
    """
    from dvc.repo import Repo

    names = [stage.name for stage in Repo(str(root / HERE)).index.stages if _group(stage.name) in groups]
    return sorted(names, key=lambda name: (GROUPS.index(_group(name)), name.rpartition("-")[2].zfill(9)))


def _group(name: str) -> str:
    return name.split("@")[0]


def run_study(root: Path, groups: Sequence[str], jobs: int = 1) -> list[str]:
    """Run what is not up to date; the names of runs that failed."""
    names = runs_of(root, groups)
    started = time.monotonic()

    def one(place: int, name: str) -> bool:
        began = time.monotonic()
        seen: list[str] = []
        words = ["--wait-for-lock", "repro", "--single-item", name]
        code = run_dvc(words, root / HERE, {"OMP_NUM_THREADS": "1"} if jobs > 1 else None, seen.append)
        seconds = time.monotonic() - began
        state = (
            "failed" if code else "done" if any("Running stage" in line for line in seen) else "up to date"
        )
        print(f"[{place}/{len(names)}] {name}: {state}, {seconds:.0f} s", flush=True)
        if code:
            print("\n".join(seen[-20:]), file=sys.stderr, flush=True)
        return not code

    failed: list[str] = []
    places = {name: place for place, name in enumerate(names, 1)}
    with ThreadPoolExecutor(jobs) as pool:
        for _, group in groupby(names, key=_group):  # a group may read what the one before it made
            part = list(group)
            ended = pool.map(one, [places[name] for name in part], part)
            failed += [name for name, well in zip(part, ended, strict=True) if not well]
    print(f"{len(names) - len(failed)} of {len(names)} runs, {time.monotonic() - started:.0f} s", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], default=[], help="(default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (%(default)s)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    with command("study"):
        environment.apply(root)
        try:
            with lifeline(watch_starters=False, on_stop=stop_all):
                if code := repro(root, ["sft"]):
                    fail("study", "the SFT checkpoint could not be made; see above", code)
                failed = run_study(root, options.groups or GROUPS, options.jobs)
                code = run_dvc(["--wait-for-lock", "repro", "--single-item", "report"], root / HERE)
        except Stopped as stopped:
            fail("study", f"stopped by {stopped.signal.name}; run again to continue", 128 + stopped.signal)
        if failed:
            fail("study", f"{len(failed)} runs failed ({', '.join(failed)}); run again to try them again")
    return code


if __name__ == "__main__":
    sys.exit(main())
