"""Validate the tables before anything is trained on them.

Reads data/needles/{sft,rl,eval}.jsonl and opens each video they name. Runs one great-expectations suite per
table (row count first). Writes data/prepared/{sft,rl,eval}.jsonl, the same rows in one spelling, and
data/prepared/report.json, which holds no times and no paths of this machine.

With data.hub, SFT and RL rows are those of data/hub, converted to our grammar; suites judge them, what became
of each published row, and each benchmark. data/prepared/media.jsonl then names the media that the tables use.

Ends with 0 if every critical expectation passed, 1 if one failed or a table cannot be read, 3 if none failed
but one could not be checked. A run that does not end with 0 writes no tables; its report is
.scratch/validate/report.json.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import shutil
import sys
from typing import TYPE_CHECKING

from paravt.checkpoints import publish
from paravt.config import Params
from paravt.data.media import on_this_machine, sha256_of, write_manifest
from paravt.data.schema import (
    Row,
    TraceRow,
    VideoFacts,
    ledger_frame,
    question_frame,
    read_rows,
    trace_frame,
)
from paravt.data.training import ledger_rows
from paravt.rollout import Sample, write_jsonl
from paravt.video import VideoError, file_paths, open_video
from stages import params as parameters
from stages.command import command, fail
from stages.outputs import write_json
from stages.tracking import StageReporter, stage_run

if TYPE_CHECKING:
    import pandas as pd

    from stages.prepare import Prepared
    from stages.suites import Outcome

TABLES = ("sft", "rl", "eval")
SOURCE, TARGET, SCRATCH = Path("data/needles"), Path("data/prepared"), Path(".scratch/validate")
FAILED, COULD_NOT_RUN = 1, 3


@dataclass
class Validation:
    """Rows and outcomes of each table, and what opening each video gave."""

    rows: dict[str, list[Row]]
    outcomes: dict[str, list[Outcome]]
    videos: dict[str, VideoFacts]
    published: Prepared | None = None

    @property
    def problems(self) -> list[tuple[str, Outcome]]:
        """(suite, outcome) of what stops the pipeline; failures stand before what could not be checked."""
        found = [(name, o) for name, outcomes in self.outcomes.items() for o in outcomes if o.stops]
        return sorted(found, key=lambda item: _rank(item[1]))

    @property
    def warnings(self) -> list[tuple[str, Outcome]]:
        """(suite, outcome) of what does not hold and does not stop the pipeline."""
        found = [(name, o) for name, outcomes in self.outcomes.items() for o in outcomes]
        return [(name, o) for name, o in found if o.status != "passed" and not o.stops]

    @property
    def exit_code(self) -> int:
        if not self.problems:
            return 0
        return FAILED if any(o.status == "failed" for _, o in self.problems) else COULD_NOT_RUN

    def sentence(self) -> str:
        """One sentence about the first problem, and how many more there are."""
        suite, outcome = self.problems[0]
        more = len(self.problems) - 1
        return outcome.sentence(suite) + (f"; {more} more in {SCRATCH / 'report.json'}" if more else "")

    def to_json(self) -> dict:
        suites = {}
        for name, outcomes in self.outcomes.items():
            states = Counter(outcome.status for outcome in outcomes)
            suites[name] = {
                "rows": len(self.rows[name]),
                "passed": not any(outcome.stops for outcome in outcomes),
                "warnings": sum(suite == name for suite, _ in self.warnings),
                "by": _composition(self.rows[name]),
                "expectations": {s: states[s] for s in ("passed", "failed", "could_not_run")},
                "outcomes": [outcome.to_json() for outcome in outcomes],
            }
        opened = [facts.duration_s for facts in self.videos.values() if facts.duration_s is not None]
        videos = {"named": len(self.videos), "opened": len(opened), "seconds": round(sum(opened), 3)}
        report = {"passed": self.exit_code == 0, "videos": videos, "suites": suites}
        return report if self.published is None else report | {"published": self.published.to_json()}


def _rank(outcome: Outcome) -> tuple[bool, bool]:
    """A missing column explains the checks that it breaks: it goes first, they go last."""
    return outcome.status == "could_not_run", outcome.expectation != "expect_column_to_exist"


def validate(
    source: Path,
    docs: Path | None = None,
    timeout_s: float = 60.0,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    published: Prepared | None = None,
) -> Validation:
    """Judge the tables of `source`, or published rows in their place. Videos are named as tables name them.

    Data Docs go to `docs` if given. Raises TableError for a table that cannot be read at all.
    """
    from stages.suites import (
        benchmark_suite,
        new_context,
        published_suite,
        question_suite,
        run_suite,
        trace_suite,
    )

    rows = {
        name: published.rows[name]
        if published and name in published.rows
        else read_rows(source / f"{name}.jsonl")
        for name in TABLES
    }
    known = published.facts if published else {}
    videos = known | open_all([path for path in _videos(rows) if path not in known], timeout_s, progress)
    frames = {name: (trace_frame if name == "sft" else question_frame)(rows[name], videos) for name in TABLES}
    suites = {"sft": trace_suite(), "rl": question_suite(False), "eval": question_suite(True)}
    held_out = ["eval"]
    for name, benchmark in (published.benchmarks if published else {}).items():
        rows[name] = benchmark
        frames[name] = question_frame(benchmark, videos)
        suites[name] = benchmark_suite(overlap_stops=published.drops_overlap)
        held_out.append(name)
    for name, ledger in (published.ledgers if published else {}).items():
        rows[name] = ledger_rows(ledger)
        frames[name] = ledger_frame(rows[name])
        suites[name] = published_suite(published.max_set_aside)
    training = {name: _videos({name: rows[name]}) for name in ("sft", "rl")}
    contents = {video: name for name, used in training.items() for video in _contents(used)}
    for name in held_out:
        _mark_shared(frames[name], contents)
    context = new_context()
    if docs is not None:
        _add_site(context, docs)
    outcomes = {name: run_suite(context, name, suites[name], frames[name]) for name in frames}
    if docs is not None:
        context.build_data_docs()
    return Validation(rows, outcomes, videos, published)


def open_all(
    paths: Sequence[str], timeout_s: float, progress: Callable[[int, int, str], None]
) -> dict[str, VideoFacts]:
    """Open each video once and read its first frame: its duration, or the reason why it cannot be used."""
    facts = {}
    for number, path in enumerate(paths, 1):
        try:
            with open_video(on_this_machine(path), timeout_s=timeout_s) as video:
                video.frames_at([0.0])
                facts[path] = VideoFacts(duration_s=float(video.duration_s))
        except VideoError as error:
            facts[path] = VideoFacts(problem=f"{error.reason}: {error}")
        progress(number, len(paths), "videos opened")
    return facts


def write_prepared(validation: Validation, target: Path) -> None:
    """The tables that passed, each row read and written again, and the report."""

    def write(folder: Path) -> None:
        for name in (name for name in TABLES if name in validation.rows):
            kind = TraceRow if name == "sft" else Sample
            rows = validation.rows[name]
            write_jsonl(folder / f"{name}.jsonl", [kind.from_json(row.data) for row in rows])
        if validation.published is not None:
            write_manifest(folder / "media.jsonl", validation.published.media)
        write_json(folder / "report.json", validation.to_json())

    publish(target, write)


def _videos(rows: Mapping[str, Iterable[Row]]) -> list[str]:
    """Every video named, in order of first mention."""
    found: dict[str, None] = {}
    for table in rows.values():
        for row in table:
            sample = row.data.get("sample", row.data)
            video = sample.get("video") if isinstance(sample, dict) else None
            if isinstance(video, str):
                found[video] = None
    return list(found)


def _contents(videos: Iterable[str]) -> dict[str, str]:
    """content -> path of the videos that are there."""
    found = {}
    for video in videos:
        place = Path(file_paths(on_this_machine(video))[0])
        if place.is_file():
            found[sha256_of(place)] = video
    return found


def _mark_shared(frame: pd.DataFrame, training: Mapping[str, str]) -> None:
    """Add split_check: "ok", or the training table that has a video of the same content.

    `training` gives a table's name by content: a copy under another name is the same video.
    """
    if "video" not in frame:
        return
    homes = {video: training.get(content) for content, video in _contents(_named(frame)).items()}
    frame["split_check"] = [f"also in {homes[v]}" if homes.get(v) else "ok" for v in frame["video"]]


def _named(frame: pd.DataFrame) -> list[str]:
    return [video for video in dict.fromkeys(frame["video"]) if isinstance(video, str)]


def _composition(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How many rows there are of each question type and, for traces, of each kind and frame budget."""
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        sample = row.data.get("sample", row.data)
        values = {"question_type": sample.get("question_type") if isinstance(sample, dict) else None}
        values |= {name: row.data.get(name) for name in ("kind", "frame_budget")}
        for name, value in values.items():
            if value is not None:
                counted.setdefault(name, Counter())[str(value)] += 1
    return {name: dict(sorted(counter.items())) for name, counter in counted.items()}


def _add_site(context, folder: Path) -> None:
    context.add_data_docs_site(
        "validation",
        {
            "class_name": "SiteBuilder",
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
            "store_backend": {
                "class_name": "TupleFilesystemStoreBackend",
                "base_directory": str(folder.resolve()),
            },
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    with command("validate"):
        params = parameters.load()
        with stage_run("validate", params) as reporter:
            _stage(params, reporter)
    return 0


def _stage(params: Params, reporter: StageReporter) -> None:
    docs = SCRATCH / "data_docs"
    shutil.rmtree(docs, ignore_errors=True)
    published = None
    if params.data.hub is not None:
        from stages.prepare import prepare
        from stages.published import FOLDER

        published = prepare(params, FOLDER, reporter.progress)
    found = validate(SOURCE, docs, params.visual.read_timeout_s, reporter.progress, published)
    if docs.is_dir():
        reporter.artifact(docs)
    reporter.summary({f"rows/{name}": len(rows) for name, rows in found.rows.items()})
    for suite, outcome in found.warnings:
        print(f"validate: warning: {outcome.sentence(suite)}", file=sys.stderr)
    if found.exit_code:
        SCRATCH.mkdir(parents=True, exist_ok=True)
        write_json(SCRATCH / "report.json", found.to_json())
        fail("validate", found.sentence(), found.exit_code)
    write_prepared(found, TARGET)
    total = sum(len(found.rows[name]) for name in TABLES)
    print(f"validate: {total} rows in {len(TABLES)} tables and {len(found.videos)} videos are fine")


if __name__ == "__main__":
    sys.exit(main())
