"""Published data inside the stages: what `download` brings and what `validate` makes of it.

    data/hub/owner__name/...    tables, as published
    data/hub/manifest.jsonl     each media file: repository, commit, path, size, SHA-256, archive
    data/hub/prompts/NAME/...   the files that hold the prompt of a published baseline
    data/hub/report.json        commits, licences, rows, media missing by bucket, what was broken

A model is such a folder too: its small files, and the names of its weights (`paravt.weights`). Media and
weights are no outputs of a stage: they lie in the media root (PARAVT_MEDIA_ROOT, or data/media), which
`python -m stages.media` fills on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paravt.config import HubConfig
from paravt.data.baselines import fetch_prompts
from paravt.data.hub import Fetched, Hub, fetch_benchmark, licence_of
from paravt.data.media import (
    folder_name,
    media_root,
    write_manifest,
)
from paravt.data.published import MEDIA_ARCHIVES, PROMPTS, RL_TABLES, SFT_TABLES, SOURCES
from paravt.data.sentinel import Resolver
from paravt.data.tables import Table, named_media, read_table, rl_tables, sft_tables
from paravt.reporter import Reporter
from stages.outputs import write_json

FOLDER = Path("data/hub")
MANIFEST, REPORT = "manifest.jsonl", "report.json"
SHOWN = 5


def bring(config: HubConfig, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Fill `folder` with tables, models, manifest and report; returns the report.

    Every repository is opened, and so its licence looked at, before the first file is moved.
    """
    fetch_prompts(config.prompts, folder / PROMPTS)
    with Hub(media_root(), reporter, config.workers, config.keep_free_gib, tuple(config.licences)) as hub:
        training = hub.open(config.training.repository, revision=config.training.revision)
        source = hub.open(config.media.repository, revision=config.media.revision)
        models = [
            hub.open(model.repository, "model", model.revision)
            for model in [*filter(None, (config.model, config.sft_model)), *config.models]
        ]
        for name in config.benchmarks:
            wanted = SOURCES[name]
            hub.open(
                wanted.repository, "dataset", config.revisions.get(name, wanted.revision), wanted.moved_to
            )
        patterns = [SFT_TABLES.format(split=split) for split in config.sft_splits]
        tables = hub.fetch_tables(training, [*patterns, RL_TABLES], folder)
        catalogue = hub.catalogue(source, MEDIA_ARCHIVES)
        resolver = Resolver(catalogue.paths, chosen_buckets(config))
        manifest = hub.fetch_media(catalogue, wanted_media(config, tables, resolver))
        report: dict[str, Any] = {
            "media": {"files": len(manifest), "bytes": sum(file.size for file in manifest)},
            "buckets": resolver.report(),
            "broken": {source.repository: catalogue.problems},
            "benchmarks": {},
        }
        for model in models:
            target = folder / folder_name(model.repository)
            target.mkdir(parents=True, exist_ok=True)
            manifest += hub.fetch_model(model, target)
        for name in config.benchmarks:
            found = fetch_benchmark(
                hub, SOURCES[name], folder, config.benchmark_rows, config.revisions.get(name)
            )
            manifest += found.media
            report["benchmarks"][name] = _told(found)
            report["broken"][SOURCES[name].repository] = found.problems
        report["broken"] = {name: found for name, found in report["broken"].items() if found}
        report["repositories"] = {
            remote.repository: {
                "revision": remote.commit,
                "licence": licence_of(remote),
                "gated": remote.gated,
            }
            for remote in sorted(hub.opened.values(), key=lambda remote: remote.repository)
        }
    write_manifest(folder / MANIFEST, manifest)
    write_json(folder / REPORT, report)
    return report


def chosen_buckets(config: HubConfig) -> frozenset[str] | None:
    return None if config.buckets is None else frozenset(config.buckets)


def wanted_media(config: HubConfig, files: Sequence[Path], resolver: Resolver) -> list[str]:
    """Media paths that the first rows of the tables name and that are to be had."""

    def rows(tables: Sequence[Table], limit: int | None):
        return (row for table in tables for _, row in read_table(table, limit))

    found: dict[str, None] = {}
    for urls in (
        named_media(rows(sft_tables(files, config.sft_splits), config.sft_rows), rl=False),
        named_media(rows(rl_tables(files), config.rl_rows), rl=True),
    ):
        found.update(dict.fromkeys(path for url in urls if (path := resolver.look(url))))
    return list(found)


def _told(found: Fetched) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "media": len(found.media),
        "bytes": sum(file.size for file in found.media),
        "missing": len(found.missing),
        "examples": found.missing[:SHOWN],
    }


def notes(report: dict[str, Any]) -> list[str]:
    """What a person should know of a download: licences that are not free for all, and what is missing."""
    lines = []
    for name, found in report["repositories"].items():
        if found["licence"] not in ("apache-2.0", "mit"):
            lines.append(f"{name} is under licence {found['licence']}; check that your use fits it")
    for bucket, found in report["buckets"].items():
        if found["missing"]:
            lines.append(
                f"{found['missing']} of {found['named']} media of bucket {bucket} are missing, "
                f"first {found['examples'][0]}"
            )
    for name, found in report["benchmarks"].items():
        if found["missing"]:
            lines.append(
                f"{found['missing']} media of benchmark {name} are missing, first {found['examples'][0]}"
            )
    for broken in report["broken"].values():
        lines += list(broken.values())[:SHOWN]
        if len(broken) > SHOWN:
            lines.append(f"{len(broken) - SHOWN} more broken files are in {FOLDER / REPORT}")
    return lines
