"""Published rows inside `validate`: converted to our grammar, each accounted for, benchmarks beside them.

Reads data/hub (`stages.published` wrote it) and opens media in the media root. Training rows whose video is
in a chosen benchmark, by content, are set aside if data.hub.drop_overlap says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
import json
from pathlib import Path
import sys
from typing import Any

from paravt.config import HubConfig, Params
from paravt.data.conversion import Rules
from paravt.data.facts import learn_facts
from paravt.data.media import (
    MediaFile,
    MediaStore,
    folder_name,
    media_path,
    media_root,
    on_this_machine,
    read_manifest,
    sha256_of,
)
from paravt.data.schema import Row, VideoFacts
from paravt.data.sentinel import Resolver
from paravt.data.tables import rl_tables, sft_tables
from paravt.data.training import Ledger, rl_questions, sft_rows
from paravt.protocol.prompts import subagent_instruction
from stages.params import digest
from stages.published import MANIFEST, chosen_buckets, wanted_media

WRITTEN_REPORTS = Path("data/reports/reports.jsonl")
CARD = {"training", "media", "model", "sft_model", "sft_splits", "reports", "licences"}
Window = tuple[str, float, float]


@dataclass
class Prepared:
    """The published rows in our form.

    `rows` are those of the training tables, `benchmarks` those that are asked; `ledgers` say what became of
    each published training row; `facts` are by the path that tables write; `media` are the manifest rows of
    what the training tables name; `source` is what the cards of models say of the data.
    """

    rows: dict[str, list[Row]]
    benchmarks: dict[str, list[Row]]
    ledgers: dict[str, Ledger]
    facts: dict[str, VideoFacts]
    media: list[MediaFile]
    buckets: dict[str, Any]
    set_aside: dict[str, int]
    drops_overlap: bool
    max_set_aside: float
    source: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "tables": {name: ledger.to_json() for name, ledger in self.ledgers.items()},
            "buckets": self.buckets,
            "benchmarks": {
                name: {"asked": len(rows), "set_aside": self.set_aside[name]}
                for name, rows in self.benchmarks.items()
            },
        }


@dataclass
class Source:
    """The training tables and what is known of their media. `named` gives contents by path in tables,
    `facts` what opening them gave.
    """

    config: HubConfig
    files: list[Path]
    manifest: dict[str, MediaFile]
    resolver: Resolver
    named: dict[str, str]
    facts: dict[str, VideoFacts]

    @property
    def repository(self) -> str:
        return self.config.media.repository

    def video_of(self, path: str) -> str:
        return media_path(self.repository, path)


def open_source(
    params: Params,
    folder: Path,
    besides: Iterable[str] = (),
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Source:
    """The tables in `folder`, their media opened, and the videos `besides`.

    Raises ValueError for media of the manifest that the root lacks.
    """
    config = params.data.hub
    if config is None:
        raise ValueError("data.hub is null, so there are no published rows to prepare")
    store = MediaStore(media_root())
    everything = read_manifest(folder / MANIFEST)
    lacking = [file for file in everything if store.lacks(file)]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(everything)} files of the manifest are not in {store.root}, first "
            f"{lacking[0].path} of {lacking[0].repository}; run `python -m stages.media` to fetch them"
        )
    manifest = {file.path: file for file in everything if file.repository == config.media.repository}
    files = sorted((folder / folder_name(config.training.repository)).rglob("*.parquet"))
    resolver = Resolver(manifest, chosen_buckets(config))
    wanted = wanted_media(config, files, resolver)
    named = {media_path(config.media.repository, path): manifest[path].sha256 for path in wanted}
    facts = learn_facts(
        store,
        named | {video: sha256_of(on_this_machine(video)) for video in sorted(besides)},
        config.opened_videos,
        params.visual.read_timeout_s,
        config.workers,
        progress,
    )
    return Source(config, files, manifest, resolver, named, facts)


def prepare(params: Params, folder: Path, progress: Callable[[int, int, str], None]) -> Prepared:
    """Convert the tables in `folder`. Raises ValueError for media of the manifest that the root lacks."""
    if params.data.hub is None:
        raise ValueError("data.hub is null, so there are no published rows to prepare")
    benchmarks, set_aside = load_benchmarks(params.data.hub, folder)
    homes = {str(row.data["video"]): name for name, rows in benchmarks.items() for row in rows}
    source = open_source(params, folder, homes, progress)
    config, facts = source.config, source.facts
    known = _held_out(source, homes) if config.drop_overlap else facts
    known = {path: known[source.video_of(path)] for path in source.manifest if source.video_of(path) in known}
    rules = Rules(
        budgets=tuple(params.budget.choices),
        max_turns=params.episode.max_turns,
        max_calls=params.episode.calls_per_turn,
        merge=config.merge_calls,
        with_path=params.episode.mode == "agentic",
        seed=params.data.seed,
        reports=model_reports(WRITTEN_REPORTS, asked_of(params)) if config.reports == "model" else None,
    )
    traces, sft = sft_rows(
        sft_tables(source.files, config.sft_splits),
        config.sft_rows,
        source.resolver,
        source.repository,
        known,
        rules,
    )
    samples, rl = rl_questions(
        rl_tables(source.files), config.rl_rows, source.resolver, source.repository, known
    )
    used = {trace.sample.video for trace in traces} | {sample.video for sample in samples}
    for rows in benchmarks.values():
        for row in rows:
            row.data["meta"] = row.data["meta"] | {"duration_s": facts[row.data["video"]].duration_s}
    return Prepared(
        {
            "sft": _rows(trace.to_json() for trace in traces),
            "rl": _rows(sample.to_json() for sample in samples),
        },
        benchmarks,
        {"published_sft": sft, "published_rl": rl},
        facts,
        [file for path, file in sorted(source.manifest.items()) if source.video_of(path) in used],
        source.resolver.report(),
        set_aside,
        config.drop_overlap,
        config.max_set_aside,
        config.model_dump(mode="json", include=CARD),
    )


def _held_out(source: Source, homes: Mapping[str, str]) -> dict[str, VideoFacts]:
    """The facts, in which a training video whose content is in a benchmark is not to be used."""
    contents = {sha256_of(on_this_machine(video)): name for video, name in homes.items()}
    return {
        video: VideoFacts(problem=f"it is in benchmark {contents[sha256]}: {video}")
        if sha256 in contents
        else source.facts[video]
        for video, sha256 in source.named.items()
    }


def load_benchmarks(config: HubConfig, folder: Path) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """The questions of each chosen benchmark, and how many rows are set aside.

    A question exists if its video is in the manifest of `folder`: what else lies in this machine's media root
    does not count. With a row limit only the first rows have media; the others are set aside like rows that
    are no question.
    """
    from paravt import benchmarks

    place = benchmarks.Place(tables=folder, media=media_root())
    brought = {media_path(file.repository, file.path) for file in read_manifest(folder / MANIFEST)}
    found, set_aside = {}, {}
    for name in config.benchmarks:
        questions = benchmarks.get(name).load(place)
        here = [sample for sample in questions.samples if sample.video in brought]
        found[name] = _rows(sample.to_json() for sample in here)
        set_aside[name] = questions.rows - len(here)
    return found, set_aside


def _rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Records as JSON gives them back (tuples are lists), numbered from 1."""
    return [Row(number, json.loads(json.dumps(record))) for number, record in enumerate(records, 1)]


def asked_of(params: Params) -> str:
    """What a report depends on beside its model and its window: the frames, the instruction, the limit."""
    visual = params.visual.model_dump(mode="json", exclude={"read_timeout_s"})
    return digest(visual, params.episode.subagent, subagent_instruction((0.0, 1.0)))


def model_reports(path: Path, asked: str) -> dict[Window, str]:
    """Reports that one model wrote, `asked` so, by window. Raises ValueError that says how to have them."""
    how = "run `python -m stages.reports MODEL`, or set data.hub.reports: row"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {how}")
    rows, torn = read_reports(path)
    found = {model: reports for (model, way), reports in rows.items() if way == asked}
    if not found:
        raise ValueError(f"{path} holds no report with these frames and this instruction; {how}")
    if len(found) > 1:
        raise ValueError(
            f"{path} holds reports of the models {', '.join(sorted(found))}; keep the lines of one"
        )
    [reports] = found.values()
    others = sum(map(len, rows.values())) - len(reports)
    if torn or others:
        print(f"validate: {path}: {torn} torn lines and {others} of other frames left out", file=sys.stderr)
    return reports


def read_reports(path: Path) -> tuple[dict[tuple[str, str], dict[Window, str]], int]:
    """Reports by window, by the model that wrote them and what it was asked (`asked_of`); and how many lines
    are torn or lack these names: a kill may cut the last one.
    """
    found: dict[tuple[str, str], dict[Window, str]] = {}
    torn = 0
    with open(path, "rb") as file:
        for line in filter(bytes.strip, file):
            try:
                row = json.loads(line)
                key, window = (row["model"], row["asked"]), (row["video"], row["start_s"], row["end_s"])
                found.setdefault(key, {})[window] = row["report"]
            except (ValueError, KeyError, TypeError):
                torn += 1
    return found, torn
