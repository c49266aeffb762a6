"""What media a repository holds, archives included, and bringing those that are wanted.

The hub does not say which archive holds which video. A zip keeps its list of members at its end and a tar a
header before each, so both are listed by ranged reads of a few kilobytes, once; the list is kept under the
archive's checksum. Then, for each archive:

    most of it wanted    downloaded whole (resumed, SHA-256 compared), all its members unpacked, then removed
    little of it wanted  only those members are read, by ranges; a zip's checksum of each is compared

An archive or member that is not whole is a counted problem of those files; an unsafe archive stops it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
import hashlib
import json
import logging
from pathlib import Path
import re
import shutil
from typing import IO

from filelock import FileLock

from paravt.data.archives import (
    Archive,
    ArchiveError,
    BrokenArchive,
    Joined,
    Member,
    is_tar,
    read_listing,
    write_listing,
)
from paravt.data.media import MediaFile
from paravt.data.patience import HubError
from paravt.data.transfer import Client, Remote, RemoteFile

log = logging.getLogger("paravt")

WHOLE_SHARE = 0.5  # above this share of its bytes an archive is downloaded whole
SMALL_ARCHIVE_BYTES = 64 * 2**20
LISTING_BLOCK, MEMBER_BLOCK = 2**18, 2**23
GIB = 2**30


@dataclass(frozen=True)
class Bundle:
    """One archive: a file, or its parts in order."""

    name: str
    parts: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def key(self) -> str:
        """Names the content."""
        return hashlib.sha256(" ".join(part.key for part in self.parts).encode()).hexdigest()


@dataclass
class Catalogue:
    """The media of one repository: path -> the plain file, or the archive and member that hold it."""

    remote: Remote
    plain: dict[str, RemoteFile] = field(default_factory=dict)
    packed: dict[str, tuple[Bundle, Member]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Archives and members that cannot be read, by path, with what is wrong."""
    contents: dict[Bundle, dict[str, str]] = field(default_factory=dict)
    """What was unpacked from each archive so far: path -> SHA-256."""

    @property
    def paths(self) -> set[str]:
        return self.plain.keys() | self.packed.keys()


def read_catalogue(
    client: Client, remote: Remote, archives: Sequence[str], files: Sequence[str], workers: int
) -> Catalogue:
    """What the archives and files that match the patterns hold. Raises HubError, ArchiveError if unsafe."""
    found = Catalogue(remote)
    found.plain = {path: file for path, file in remote.files.items() if matches(path, files)}
    bundles = _bundles(file for path, file in remote.files.items() if matches(path, archives))

    def listed(bundle: Bundle) -> list[Member] | str:
        try:
            return _list(client, remote, bundle)
        except BrokenArchive as error:
            return str(error)

    for bundle, members in zip(bundles, at_once(listed, bundles, workers), strict=True):
        if isinstance(members, str):
            found.problems[bundle.name] = members
            log.warning("%s", members)
            continue
        for member in members:
            other = found.packed.get(member.path)
            if other and (other[1].size, other[1].crc) != (member.size, member.crc):
                raise ArchiveError(
                    f"{remote.repository}: {other[0].name} and {bundle.name} hold different {member.path}"
                )
            found.packed[member.path] = (bundle, member)
    return found


def bring(
    client: Client, catalogue: Catalogue, wanted: Iterable[str], workers: int, keep_free_gib: float
) -> list[MediaFile]:
    """Have the wanted paths in the media root; those that cannot be had go to `catalogue.problems`.

    Checks the disk space first. Files that are here already are not asked for. Raises HubError.
    """
    remote, store = catalogue.remote, client.store
    wanted = sorted(set(wanted) & catalogue.paths)
    absent = [path for path in wanted if not _is_here(client, catalogue, path)]
    plain = [catalogue.plain[path] for path in absent if path in catalogue.plain]
    whole: dict[Bundle, list[Member]] = {}
    few: dict[Bundle, list[Member]] = {}
    for bundle, members in _by_bundle(catalogue, absent).items():
        (whole if _most_wanted(bundle, members) else few)[bundle] = members
    everything = _by_bundle(catalogue, catalogue.packed)
    plain_bytes = sum(file.size for file in plain)
    few_bytes = sum(member.size for members in few.values() for member in members)
    unpacked_bytes = sum(member.size for bundle in whole for member in everything[bundle])
    # archives go as soon as they are unpacked, so only those under way lie beside their members
    under_way = sum(sorted((bundle.size for bundle in whole), reverse=True)[:workers])
    needed = plain_bytes + few_bytes + unpacked_bytes + under_way
    check_disk(store.root, needed, keep_free_gib, remote.repository)
    client.progress.expect(plain_bytes + few_bytes + sum(bundle.size for bundle in whole))
    jobs: list[Callable[[], None]] = [
        *(partial(_bring_plain, client, remote, file) for file in plain),
        *(partial(_unpack_whole, client, catalogue, bundle, everything[bundle]) for bundle in whole),
        *(partial(_read_members, client, catalogue, bundle, few[bundle]) for bundle in few),
    ]
    at_once(lambda job: job(), jobs, workers, client.stop)
    return [file for path in wanted if (file := _manifest_row(client, catalogue, path))]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches one of the patterns; `*` crosses folders, and a bare name is found anywhere."""
    return any(fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}") for pattern in patterns)


def check_disk(root: Path, needed: int, keep_free_gib: float, what: str) -> None:
    """Raises HubError if `needed` bytes would leave less than `keep_free_gib` GiB free under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if needed and free - needed < keep_free_gib * GIB:
        raise HubError(
            f"{what} needs {needed / GIB:.2f} GiB under {root.resolve()}, where {free / GIB:.2f} GiB are "
            f"free and {keep_free_gib:g} GiB are to stay free; make room, set PARAVT_MEDIA_ROOT to a larger "
            "disk, or write smaller row limits"
        )


def _bundles(files: Iterable[RemoteFile]) -> list[Bundle]:
    """Archives, with the parts of a split tar joined in order of their names."""
    groups: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        name = re.sub(r"(\.tar)[._-].*$", r"\1", file.path) if is_tar(file.path) else file.path
        groups.setdefault(name, []).append(file)
    return [Bundle(name, tuple(parts)) for name, parts in groups.items()]


def _list(client: Client, remote: Remote, bundle: Bundle) -> list[Member]:
    kept = client.store.listing(bundle.key)
    members = read_listing(kept)
    if members is None:

        def ask() -> list[Member]:
            with _remote_archive(client, remote, bundle, LISTING_BLOCK) as archive:
                return archive.members()

        members = client.patiently(ask, f"{remote.repository}: {bundle.name}")
        write_listing(kept, members)
    return members


def _most_wanted(bundle: Bundle, members: Sequence[Member]) -> bool:
    packed = sum(member.packed for member in members)
    return bundle.size <= SMALL_ARCHIVE_BYTES or packed > WHOLE_SHARE * bundle.size


def _bring_plain(client: Client, remote: Remote, file: RemoteFile) -> None:
    blob = client.blob(remote, file)
    client.store.show(remote.repository, file.path, blob.name)


def _unpack_whole(client: Client, catalogue: Catalogue, bundle: Bundle, members: Sequence[Member]) -> None:
    """Download an archive, unpack all its members, remove it."""
    remote = catalogue.remote
    with FileLock(client.store.lock(f"archive-{bundle.key}")), ExitStack() as stack:
        catalogue.contents.pop(bundle, None)  # read anew: another worker may have been here
        if all(_is_here(client, catalogue, member.path) for member in members):
            return
        blobs = [client.blob(remote, part) for part in bundle.parts]
        opened = [stack.enter_context(open(blob, "rb")) for blob in blobs]
        with Archive(_joined(opened, bundle), f"{remote.repository}: {bundle.name}", bundle.size) as archive:
            _take(client, catalogue, archive, members)
        for blob in blobs:
            blob.unlink(missing_ok=True)


def _read_members(client: Client, catalogue: Catalogue, bundle: Bundle, members: Sequence[Member]) -> None:
    """Read a few members of an archive on the hub."""
    remote = catalogue.remote

    def read() -> None:
        with _remote_archive(client, remote, bundle, MEMBER_BLOCK) as archive:
            _take(client, catalogue, archive, members)

    with FileLock(client.store.lock(f"archive-{bundle.key}")):
        catalogue.contents.pop(bundle, None)
        client.patiently(read, f"{remote.repository}: {bundle.name}")
    client.progress.add(sum(member.size for member in members))


def _take(client: Client, catalogue: Catalogue, archive: Archive, members: Sequence[Member]) -> None:
    store, repository = client.store, catalogue.remote.repository
    for member in members:
        if _is_here(client, catalogue, member.path) or member.path in catalogue.problems:
            continue
        aside = store.scratch()
        try:
            sha256 = archive.extract(member, aside)
        except BrokenArchive as error:
            catalogue.problems[member.path] = str(error)
            log.warning("%s", error)
            continue
        store.adopt(aside, sha256)
        store.show(repository, member.path, sha256)
        bundle, _ = catalogue.packed[member.path]
        _unpacked(client, catalogue, bundle)[member.path] = sha256
        with open(_record(client, bundle), "a", encoding="utf-8") as file:
            file.write(json.dumps([member.path, sha256]) + "\n")


def _by_bundle(catalogue: Catalogue, paths: Iterable[str]) -> dict[Bundle, list[Member]]:
    found: dict[Bundle, list[Member]] = {}
    for path in paths:
        if path in catalogue.packed:
            bundle, member = catalogue.packed[path]
            found.setdefault(bundle, []).append(member)
    return found


def _is_here(client: Client, catalogue: Catalogue, path: str) -> bool:
    """Whether a path leads to what the commit has there: the plain file's content, or the member's as it was
    unpacked from this very archive.
    """
    sha256 = client.store.shown(catalogue.remote.repository, path)
    if sha256 is None:
        return False
    if path in catalogue.plain:
        file = catalogue.plain[path]
        return sha256 == (file.sha256 or client.store.known(file.git_oid))
    return _unpacked(client, catalogue, catalogue.packed[path][0]).get(path) == sha256


def _unpacked(client: Client, catalogue: Catalogue, bundle: Bundle) -> dict[str, str]:
    """path -> SHA-256 of what was unpacked from an archive, by whichever worker; a torn line is nothing."""
    if bundle not in catalogue.contents:
        found = {}
        record = _record(client, bundle)
        for line in record.read_text(encoding="utf-8").splitlines() if record.is_file() else ():
            with suppress(ValueError):
                path, sha256 = json.loads(line)
                found[path] = sha256
        catalogue.contents[bundle] = found
    return catalogue.contents[bundle]


def _record(client: Client, bundle: Bundle) -> Path:
    return client.store.listing(bundle.key).with_suffix(".unpacked.jsonl")


def _manifest_row(client: Client, catalogue: Catalogue, path: str) -> MediaFile | None:
    remote = catalogue.remote
    sha256 = client.store.shown(remote.repository, path)
    if sha256 is None:
        return None
    archive = catalogue.packed[path][0].name if path in catalogue.packed else None
    size = client.store.blob(sha256).stat().st_size
    return MediaFile(remote.repository, remote.commit, path, size, sha256, archive, remote.kind)


@contextmanager
def _remote_archive(client: Client, remote: Remote, bundle: Bundle, block: int) -> Iterator[Archive]:
    """The archive as it lies on the hub, read by ranges."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(endpoint=client.endpoint, token=client.token or False, skip_instance_cache=True)
    prefix = "datasets/" if remote.kind == "dataset" else ""
    root = f"{prefix}{remote.found_as}@{remote.commit}"
    with ExitStack() as stack:
        parts = [
            stack.enter_context(hub.open(f"{root}/{part.path}", "rb", block_size=block))
            for part in bundle.parts
        ]
        with Archive(_joined(parts, bundle), f"{remote.repository}: {bundle.name}", bundle.size) as archive:
            yield archive


def _joined(parts: Sequence[IO[bytes]], bundle: Bundle) -> IO[bytes] | Joined:
    return parts[0] if len(parts) == 1 else Joined(parts, [part.size for part in bundle.parts])


def at_once(
    function: Callable, items: Sequence, workers: int, stop: Callable[[], None] = lambda: None
) -> list:
    """`function` of each item, in order, `workers` at a time.

    The first error, or an interrupt, keeps those that wait from starting; `stop` is told to end the others.
    """
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="paravt-hub") as pool:
        jobs: list[Future] = [pool.submit(function, item) for item in items]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [job.result() for job in jobs]
