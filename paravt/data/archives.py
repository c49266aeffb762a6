"""Zip and tar archives: what is in them, and taking members out without trusting them.

An archive is one file or several parts joined in order, on the disk or on the hub (anything that can seek and
read). Its listing is checked before anything is written:

    names     relative, without "..", absolute paths, backslashes or control characters, each name once
    kinds     plain files; links and devices are refused, folders are passed over
    sizes     at most MAX_RATIO times the archive in all, so that a bomb is not unpacked

A member is written under a new name, its size and checksum compared, and only then shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
import hashlib
import io
import json
from pathlib import Path
import stat
import tarfile
from typing import IO
import zipfile
import zlib

from paravt.data.media import safe_path

MAX_RATIO = 100  # a video hardly shrinks; subtitles shrink to a fifth
MIN_ALLOWED_BYTES = 64 * 2**20
MAX_MEMBERS = 2_000_000
_CHUNK = 2**20
_PLAIN_KINDS = (0, stat.S_IFREG)


class ArchiveError(RuntimeError):
    """An archive that is not safe to unpack; the message names it and the member."""


class BrokenArchive(ArchiveError):
    """An archive or a member that is not whole."""


@dataclass(frozen=True)
class Member:
    """A file in an archive: `size` bytes, `packed` as it lies there; a tar's data begin at `offset`."""

    path: str
    size: int
    packed: int
    crc: int | None = None
    offset: int | None = None


class Joined(io.RawIOBase):
    """Several seekable files read as one."""

    def __init__(self, parts: Sequence[IO[bytes]], sizes: Sequence[int]) -> None:
        self._parts, self._sizes, self._at = parts, sizes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: sum(self._sizes)}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        first = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            if self._at < first + size:
                part.seek(self._at - first)
                data = part.read(min(len(buffer), first + size - self._at))
                buffer[: len(data)] = data
                self._at += len(data)
                return len(data)
            first += size
        return 0

    def close(self) -> None:
        for part in self._parts:
            part.close()
        super().close()


class Archive:
    """An open zip or tar of `size` bytes, told apart by its name. A context manager; `file` stays open."""

    def __init__(self, file: IO[bytes], name: str, size: int) -> None:
        self.name, self.size, self._file = name, size, file
        self._zip: zipfile.ZipFile | None = None
        self._by_path: dict[str, zipfile.ZipInfo] = {}
        if not is_tar(name):
            try:
                self._zip = zipfile.ZipFile(file)
            except (zipfile.BadZipFile, EOFError) as error:
                raise BrokenArchive(f"{name} cannot be read as an archive: {error}") from error
            # the names as they stand in the file: `filename` is cut at a NUL byte
            self._by_path = {_plain(info.orig_filename): info for info in self._zip.infolist()}

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._zip:
            self._zip.close()

    def members(self) -> list[Member]:
        """The plain files inside. Raises ArchiveError if they are unsafe, BrokenArchive if unreadable."""
        try:
            members = list(self._zip_members() if self._zip else self._tar_members())
        except (tarfile.TarError, EOFError) as error:
            raise BrokenArchive(f"{self.name} cannot be read as an archive: {error}") from error
        seen: dict[str, Member] = {}
        for member in members:
            before = seen.setdefault(member.path, member)
            if before is not member and (before.size, before.crc) != (member.size, member.crc):
                twice = f"holds {member.path} twice, with different content"
                raise ArchiveError(f"{self.name} {twice}; it is not unpacked")
        total = sum(member.size for member in members)
        if total > max(MAX_RATIO * self.size, MIN_ALLOWED_BYTES) or len(members) > MAX_MEMBERS:
            raise ArchiveError(
                f"{self.name} of {self.size:,} bytes would unpack to {len(members):,} files of "
                f"{total:,} bytes; it is not unpacked"
            )
        return list(seen.values())

    def extract(self, member: Member, target: Path) -> str:
        """Write one member to `target`; returns its SHA-256.

        Raises BrokenArchive if what comes is not what the listing says; nothing is left at `target` then.
        """
        digest, crc, written = hashlib.sha256(), 0, 0
        try:
            with self._opened(member) as source, open(target, "wb") as out:
                while chunk := source.read(min(_CHUNK, member.size - written + 1)):
                    written += len(chunk)
                    if written > member.size:
                        break
                    digest.update(chunk)
                    crc = zlib.crc32(chunk, crc)
                    out.write(chunk)
            if written != member.size or member.crc not in (None, crc):
                raise BrokenArchive(f"{self.name}: {member.path} is corrupt in the archive")
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError) as error:
            target.unlink(missing_ok=True)
            raise BrokenArchive(f"{self.name}: {member.path} is corrupt in the archive ({error})") from error
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return digest.hexdigest()

    def _opened(self, member: Member) -> IO[bytes] | _Slice:
        if self._zip:
            return self._zip.open(self._by_path[member.path])
        return _Slice(self._file, member.offset or 0, member.size)

    def _zip_members(self) -> Iterator[Member]:
        for info in self._zip.infolist() if self._zip else ():
            if info.orig_filename.endswith("/"):
                continue
            if stat.S_IFMT(info.external_attr >> 16) not in _PLAIN_KINDS:
                raise ArchiveError(
                    f"{self.name} holds {info.filename!r}, a link or device; it is not unpacked"
                )
            if info.flag_bits & 1:
                raise ArchiveError(f"{self.name} holds {info.filename!r}, encrypted; it is not unpacked")
            yield Member(self._safe(info.orig_filename), info.file_size, info.compress_size, info.CRC)

    def _tar_members(self) -> Iterator[Member]:
        self._file.seek(0)
        # "r:" reads plain tars only: members of a packed one have no place of their own
        with tarfile.open(fileobj=self._file, mode="r:") as archive:
            for info in archive:
                if info.isdir():
                    continue
                if not info.isreg():
                    raise ArchiveError(
                        f"{self.name} holds {info.name!r}, a link or device; it is not unpacked"
                    )
                yield Member(self._safe(info.name), info.size, info.size, None, info.offset_data)

    def _safe(self, path: str) -> str:
        try:
            return str(safe_path(_plain(path)))
        except ValueError as error:
            words = f"holds a name that is not safe: {error}; it is not unpacked"
            raise ArchiveError(f"{self.name} {words}") from None


def is_tar(name: str) -> bool:
    return ".tar" in name.rsplit("/", 1)[-1]


def _plain(path: str) -> str:
    return path.removeprefix("./")


class _Slice(io.RawIOBase):
    """`size` bytes of a file from `offset` on."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self._at, self._left = file, offset, size

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        self._file.seek(self._at)
        data = self._file.read(size) if size else b""
        self._at += len(data)
        self._left -= len(data)
        return data


def write_listing(path: Path, members: Sequence[Member]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps([asdict(member) for member in members]), encoding="utf-8")
    aside.replace(path)


def read_listing(path: Path) -> list[Member] | None:
    """What `write_listing` wrote, None if nothing did."""
    try:
        return [Member(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None
