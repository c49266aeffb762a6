"""Where the published data lie on the hub, and what is in each repository.

    SOURCES     the benchmarks: tables, archives with media, the column that names a row's media
    SENTINELS   the virtual roots that training rows name their media by

A repository keeps its first name here even where the hub has moved it: that name is the folder of its tables
and media. `revision` is a commit where one is known; `main` is resolved to a commit at download time, and the
manifest records which.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One benchmark on the hub. Patterns are those of fnmatch over paths in the repository.

    `media_columns` hold names whose stems are those of a row's media files. `note` is for the person who is
    about to download it.
    """

    name: str
    repository: str
    tables: tuple[str, ...]
    media_columns: tuple[str, ...]
    archives: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    revision: str = "main"
    moved_to: tuple[str, ...] = ()
    note: str = ""


SOURCES = {
    source.name: source
    for source in (
        Source(
            "videomme",
            "lmms-lab/Video-MME",
            tables=("videomme/*.parquet",),
            media_columns=("videoID",),
            archives=("videos_chunked_*.zip", "subtitle.zip"),
            moved_to=("lmms-eval/Video-MME",),
            note="about 100 GB; 156 of 900 videos have no subtitles",
        ),
        Source(
            "longvideobench",
            "longvideobench/LongVideoBench",
            tables=("validation-*.parquet",),
            media_columns=("video_path", "subtitle_path"),
            archives=("videos.tar.part.*", "subtitles.tar"),
            note="gated, non-commercial; about 162 GB",
        ),
        Source(
            "lvbench",
            "lmms-lab/LVBench",
            tables=("data/train-*.parquet",),
            media_columns=("key",),
            archives=("video_chunks/*.zip",),
            moved_to=("lmms-eval/LVBench",),
            note="the videos are in split train; about 62 GB; the original is non-commercial",
        ),
        Source(
            "mlvu",
            "sy1998/MLVU_dev",
            tables=("mlvu/*.parquet",),
            media_columns=("video_name",),
            archives=("*.zip",),
            revision="96207eb9aa7101e2a495dd147684a7e618c79e12",
            note="about 248 GB; the original is non-commercial",
        ),
        Source(
            "mmvu",
            "yale-nlp/MMVU",
            tables=("validation.json",),
            media_columns=("video",),
            files=("videos/*",),
            revision="b937f414a87e9012acba49d95669020b24fa9ee9",
            note="no licence on its card; about 1 GB",
        ),
        Source(
            "charades",
            "lmms-lab/charades_sta",
            tables=("data/test-*.parquet",),
            media_columns=("video",),
            archives=("Charades_v1_480_part_*.zip",),
            revision="799008a8e37860e3bbd8418c6e3111b0bc05f648",
            moved_to=("lmms-eval/charades_sta",),
            note="about 16 GB",
        ),
    )
}

BENCHMARK_REPOSITORIES = frozenset(source.repository for source in SOURCES.values())

SENTINELS = ("longvt_source", "museg/charades", "museg/et_instruct_164k", "selfqa")
SFT_SPLITS = ("charades", "geminicot", "longvideoreason", "museg", "selftrace", "tvg", "videor1")
SFT_TABLES = "*paravt_sft_{split}*.parquet"
RL_TABLES = "*paravt_rl_*.parquet"
MEDIA_ARCHIVES = ("*.zip",)
PROMPTS = "prompts"
"""The folder beside the tables for prompts of published baselines, a folder each."""
