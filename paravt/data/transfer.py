"""Files from the hub into the media root: resumed, checked, patient, and clear about what stops them.

A download is written to `parts/CHECKSUM` and goes on from there after a drop, a kill or a reboot. When its
bytes are all there its checksum is compared (SHA-256 of large files, git's SHA-1 of small ones); only then it
becomes a blob. A lock per content lets several workers fill one root: the second waits and finds the blob.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
import logging
import os
from pathlib import Path
import threading
import time
from typing import IO

from filelock import FileLock

from paravt.data.media import MediaStore, git_oid_of, sha256_of
from paravt.data.patience import HubError, Patience
from paravt.reporter import LogReporter, Reporter

log = logging.getLogger("paravt")

PUBLIC_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. Large files are known by `sha256`, small ones by git's `git_oid`."""

    path: str
    size: int
    git_oid: str
    sha256: str | None

    @property
    def key(self) -> str:
        return self.sha256 or self.git_oid


@dataclass(frozen=True)
class Remote:
    """A repository at one commit. `repository` is the name asked for, `found_as` what the hub calls it."""

    repository: str
    found_as: str
    kind: str
    commit: str
    licence: str | None
    gated: bool
    files: dict[str, RemoteFile]


@dataclass
class Progress:
    """Bytes of all threads together, told to the reporter at most twice a second."""

    reporter: Reporter
    total: int = 0
    done: int = 0
    _told: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, size: int) -> None:
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            now = time.monotonic()
            if now - self._told < 0.5 and self.done < self.total:
                return
            self._told = now
            total = max(self.total, self.done)
            unit, name = (2**20, "MiB") if total >= 2**24 else (2**10, "KiB")
            self.reporter.progress(self.done // unit, total // unit, f"{name} downloaded")


class Client(Patience):
    """The hub's API and files. `endpoint` and token come from HF_ENDPOINT and HF_TOKEN, as everywhere."""

    def __init__(self, store: MediaStore, reporter: Reporter | None = None, wait_s: float = 1.0) -> None:
        from huggingface_hub import HfApi, get_token

        endpoint = (os.environ.get("HF_ENDPOINT") or PUBLIC_HUB).rstrip("/")
        super().__init__(endpoint, get_token(), store.root, wait_s)
        self.store = store
        self.api = HfApi(endpoint=self.endpoint, token=self.token or False)
        self.progress = Progress(reporter or LogReporter())

    def open(self, repository: str, kind: str, revision: str, moved_to: tuple[str, ...] = ()) -> Remote:
        """The repository's commit and files. Tries the names of `moved_to` where the hub knows it no more.

        Raises HubError in one sentence.
        """
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        for name in (repository, *moved_to):
            try:
                return self._open(repository, name, kind, revision)
            except GatedRepoError as error:
                raise HubError(self.gate(repository, kind)) from error
            except RepositoryNotFoundError as error:
                missing = error
        names = " or ".join((repository, *moved_to))
        hint = "" if self.token else ", or it is private: set HF_TOKEN to a token that may read it"
        raise HubError(f"{self.endpoint} has no {kind} {names}{hint}") from missing

    def _open(self, repository: str, name: str, kind: str, revision: str) -> Remote:
        from huggingface_hub.errors import RevisionNotFoundError
        from huggingface_hub.hf_api import RepoFile

        try:
            info = self.patiently(
                lambda: self.api.repo_info(name, repo_type=kind, revision=revision), name, kind
            )
        except RevisionNotFoundError as error:
            raise HubError(
                f"{repository} has no revision {revision!r}; write a commit or a branch that it has"
            ) from error
        if info.gated:  # the listing is open to all, the files are not
            self.patiently(lambda: self.api.auth_check(name, repo_type=kind), repository, kind)
        listing = self.patiently(
            lambda: list(self.api.list_repo_tree(name, recursive=True, revision=info.sha, repo_type=kind)),
            name,
            kind,
        )
        files = {
            item.path: RemoteFile(item.path, item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
            for item in listing
            if isinstance(item, RepoFile)
        }
        card = info.card_data
        licence = card.get("license") if card else None
        return Remote(repository, name, kind, info.sha, licence, bool(info.gated), files)

    def blob(self, remote: Remote, file: RemoteFile) -> Path:
        """The content of a file, downloaded if it is not here. Raises HubError."""
        if found := self._here(file):
            return found
        with FileLock(self.store.lock(file.key)):
            return self._here(file) or self._download(remote, file)

    def _here(self, file: RemoteFile) -> Path | None:
        sha256 = file.sha256 or self.store.known(file.git_oid)
        blob = self.store.blob(sha256) if sha256 else None
        return blob if blob and blob.is_file() else None

    def _download(self, remote: Remote, file: RemoteFile) -> Path:
        part = self.store.part(file.key)
        what = f"{remote.repository}: {file.path}"
        for _ in range(2):  # what arrives wrong is asked for once more, from its first byte
            self._transfer(remote, file, part, what)
            sha256 = sha256_of(part)
            if file.key == (sha256 if file.sha256 else git_oid_of(part)):
                if not file.sha256:
                    self.store.remember(file.git_oid, sha256)
                return self.store.adopt(part, sha256)
            log.warning("%s arrived with another checksum; it is downloaded again", what)
            self.progress.add(-file.size)
            part.unlink()
        raise HubError(
            f"{what} arrived twice with a checksum that is not the hub's ({file.key[:12]}...); "
            "something between here and the hub changes it; try again later or from another network"
        )

    def _transfer(self, remote: Remote, file: RemoteFile, part: Path, what: str) -> None:
        """Bring `part` to its full size, from where it stands."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers, disable_progress_bars

        disable_progress_bars("huggingface_hub.http_get")
        url = hf_hub_url(
            remote.found_as, file.path, repo_type=remote.kind, revision=remote.commit, endpoint=self.endpoint
        )
        headers = build_hf_headers(token=self.token or False) | {"Accept-Encoding": "identity"}
        part.touch()
        if part.stat().st_size > file.size:
            os.truncate(part, 0)
        self.progress.add(part.stat().st_size)

        def attempt() -> None:
            with open(part, "r+b") as out:
                start = out.seek(0, os.SEEK_END)
                counted = _Counted(out, self.progress, self._stopped)
                http_get(url, counted, resume_size=start, headers=headers, expected_size=file.size)

        self.patiently(attempt, what, remote.kind, position=lambda: part.stat().st_size)


class _Counted:
    """A file that counts what is written to it. http_get rewinds it where a server ignores a range."""

    def __init__(self, file: IO[bytes], progress: Progress, stopped: threading.Event) -> None:
        self._file, self._progress, self._stopped = file, progress, stopped

    def write(self, data: bytes) -> int:
        if self._stopped.is_set():
            raise HubError("stopped; what is downloaded is kept, run again to go on")
        self._progress.add(len(data))
        return self._file.write(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)


@contextmanager
def online() -> Iterator[None]:
    """The hub may be asked inside, although HF_HUB_OFFLINE keeps every other command from it."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
