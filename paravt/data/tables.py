"""The published training tables on the disk: files by split, their rows, the media they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt.data.published import RL_TABLES, SFT_TABLES
from paravt.data.sentinel import RowError, row_media, videos_of


@dataclass(frozen=True)
class Table:
    """One table on the disk: its split and its file."""

    split: str
    path: Path


def sft_tables(files: Iterable[Path], splits: Sequence[str]) -> list[Table]:
    """The SFT tables of the chosen splits, in that order. Raises ValueError for a split without a table."""
    files = sorted(files)
    found = []
    for split in splits:
        matching = [file for file in files if file.match(SFT_TABLES.format(split=split))]
        if not matching:
            raise ValueError(f"no table paravt_sft_{split}*.parquet; check data.hub.sft_splits")
        found += [Table(split, file) for file in matching]
    return found


def rl_tables(files: Iterable[Path]) -> list[Table]:
    """The RL tables. Raises ValueError if there is none."""
    found = [Table("rl", file) for file in sorted(files) if file.match(RL_TABLES)]
    if not found:
        raise ValueError("no table paravt_rl_*.parquet; check data.hub.training")
    return found


def read_table(table: Table, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of the first `limit` rows. The name is the split and the row's place, which is unique."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(table.path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    if limit is not None and number >= limit:
                        return
                    yield f"{table.split}-{number:06d}", row
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{table.path.name} cannot be read as parquet ({reason}); download it again"
        ) from error


def named_media(rows: Iterable[dict[str, Any]], rl: bool) -> Iterator[str]:
    """The media that questions are about. Rows that cannot be read name none; they are counted later."""
    for row in rows:
        try:
            yield from videos_of(row) if rl else row_media(row)
        except RowError:
            continue
