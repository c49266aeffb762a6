"""A hub on loopback: the endpoints that huggingface_hub uses, serving folders, with faults on request.

Two servers, as the hub has two: one answers the API and small files, a second one (another port, so another
origin) plays the content network that large files are redirected to. Nothing of the client is replaced; it
is pointed here by HF_ENDPOINT.

    with HubServer([Repository("owner/name", folder)]) as hub:
        hub.endpoint, hub.requests
        hub.fail("data.zip", Fault("drop", after=1000))       once; times=n for n requests

`python -m tests.hub_server` builds the miniature of the published repositories and serves it until it is
stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
from pathlib import Path
import socket
import tempfile
import threading
import time
from typing import Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_BYTES = 20_000
LARGE_SUFFIXES = (".parquet", ".zip", ".safetensors", ".tar", ".mp4", ".bin")
TOKEN = "hf_right"
STRANGER = "hf_stranger"  # a valid token that may not read gated repositories


@dataclass(frozen=True)
class Entry:
    """A file as the hub lists it. Large files carry the SHA-256 of their content, small ones git's SHA-1."""

    path: str
    file: Path
    size: int
    git_oid: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_oid

    def listed(self) -> dict:
        item = {"type": "file", "path": self.path, "size": self.size, "oid": self.git_oid}
        if self.sha256:
            item["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 130}
        return item


@dataclass
class Repository:
    """A folder served as a repository. `gated` ones give files to the holder of TOKEN only."""

    id: str
    folder: Path
    kind: Literal["dataset", "model"] = "dataset"
    gated: bool = False
    licence: str | None = "apache-2.0"
    former_ids: tuple[str, ...] = ()
    pinned: str | None = None
    """A commit that its content goes by, for pins in published values."""

    def has(self, revision: str) -> bool:
        return revision in ("main", self.commit, self.pinned)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        found = {}
        for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            path, data = file.relative_to(self.folder).as_posix(), file.read_bytes()
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            large = len(data) >= LARGE_BYTES or file.name.endswith(LARGE_SUFFIXES) or ".tar.part" in file.name
            found[path] = Entry(
                path, file, len(data), git, hashlib.sha256(data).hexdigest() if large else None
            )
        return found

    @cached_property
    def commit(self) -> str:
        """Changes with any file, as a commit does."""
        text = "\n".join(f"{entry.path} {entry.git_oid}" for entry in self.entries.values())
        return hashlib.sha1(text.encode()).hexdigest()

    def info(self) -> dict:
        card = {"license": self.licence} if self.licence else {}
        return {
            "_id": self.commit[:24],
            "id": self.id,
            "sha": self.commit,
            "private": False,
            "gated": "auto" if self.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": card,
            "siblings": [{"rfilename": path} for path in self.entries],
        }


@dataclass
class Fault:
    """What goes wrong with a file, for the next `times` requests of its content.

    drop      the connection ends after `after` bytes
    corrupt   one byte is another one
    short     fewer bytes are announced and sent
    status    the status `code`, with Retry-After if `retry_after_s` is given
    slow      a pause of `seconds` before the answer
    trickle   a kilobyte, then a pause of `seconds`, and so on
    """

    kind: Literal["drop", "corrupt", "short", "status", "slow", "trickle"]
    after: int = 0
    code: int = 503
    retry_after_s: int | None = None
    seconds: float = 0.0
    times: int = 1


@dataclass(frozen=True)
class Request:
    """One request as it came, for tests to look at. `server` is hub or content."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class HubServer:
    """Context manager over both servers."""

    repositories: Sequence[Repository]
    page_size: int = 1000
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    _faults: list[tuple[str, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> HubServer:
        self._servers = [_serve(self, "hub", self.port), _serve(self, "content", 0)]
        self.endpoint, self.content = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def fail(self, part: str, fault: Fault) -> None:
        """Let `fault` happen to requests whose path holds `part`; each fault is used up in turn."""
        with self._lock:
            self._faults.append((part, fault))

    def fault_of(self, path: str) -> Fault | None:
        with self._lock:
            for part, fault in self._faults:
                if part in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def find(self, kind: str, name: str) -> tuple[Repository | None, bool]:
        """The repository, and whether `name` is a former id of it."""
        for repository in self.repositories:
            if repository.kind == kind and name in (repository.id, *repository.former_ids):
                return repository, name != repository.id
        return None, False

    def bytes_of(self, part: str) -> int:
        """How many content requests there were for paths that hold `part`."""
        return sum(part in request.path for request in self.requests if request.method == "GET")


def _serve(hub: HubServer, name: str, port: int) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"hub": hub, "name": name})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    name: str

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append(Request(self.name, self.command, path, self.headers.get("Range"), token))
        with suppress(BrokenPipeError, ConnectionResetError):
            if self.name == "content":
                self._content(path)
            elif path.startswith("api/"):
                self._api(path.split("/")[1:], parse_qs(url.query), token)
            elif "/resolve/" in f"/{path}":
                self._resolve(url.path.strip("/"), token)
            else:
                self._error(404, None, "no such page")

    # --- API

    def _api(self, parts: list[str], query: Mapping[str, list[str]], token: str | None) -> None:
        if parts == ["whoami-v2"]:
            return self._json({"name": "tester"}) if token == TOKEN else self._error(401, None, "bad token")
        fault = self.hub.fault_of("/".join(["api", *parts]))
        if fault and fault.kind == "status":
            return self._status(fault)
        kind = {"datasets": "dataset", "models": "model"}.get(parts[0])
        repository, moved = self.hub.find(kind, "/".join(parts[1:3])) if kind else (None, False)
        if repository is None:
            return self._error(404, "RepoNotFound", "Repository not found")
        if token not in (None, TOKEN, STRANGER):
            return self._error(401, None, "Invalid credentials in Authorization header")
        if moved:
            to = "/".join([parts[0], repository.id, *(quote(part, safe="") for part in parts[3:])])
            asked = urlsplit(self.path).query
            return self._redirect(307, f"/api/{to}" + (f"?{asked}" if asked else ""))
        rest = parts[3:]
        if rest == ["auth-check"]:
            return self._refuse(token) if repository.gated and token != TOKEN else self._json({})
        revision = rest[1] if len(rest) > 1 else "main"
        if not repository.has(revision):
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        match rest[:1]:
            case [] | ["revision"]:
                self._json(repository.info())
            case ["tree"]:
                self._tree(repository, "/".join(rest[2:]), query)
            case ["paths-info"]:
                wanted = parse_qs(self.body.decode())["paths"]
                self._json(self._paths(repository, wanted))
            case ["refs"]:
                main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commit}
                self._json({"branches": [main], "converts": [], "tags": []})
            case _:
                self._error(404, None, "no such endpoint")

    def _tree(self, repository: Repository, under: str, query: Mapping[str, list[str]]) -> None:
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{under}/" if under else ""
        items, folders = [], {}
        for path, entry in repository.entries.items():
            if not path.startswith(prefix):
                continue
            inner = path.removeprefix(prefix)
            above = inner.split("/")[:-1]
            for depth in range(1, len(above) + 1 if recursive else min(2, len(above) + 1)):
                folder = prefix + "/".join(above[:depth])
                folders[folder] = {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            if recursive or not above:
                items.append(entry.listed())
        if under and not items and not folders:
            return self._error(404, "EntryNotFound", f"{under} does not exist")
        items = list(folders.values()) + items
        start = int(query.get("cursor", ["0"])[0])
        page, headers = items[start : start + self.hub.page_size], {}
        if start + self.hub.page_size < len(items):
            keep = "&".join(f"{key}={value[0]}" for key, value in query.items() if key != "cursor")
            url = f"{self.hub.endpoint}{urlsplit(self.path).path}?{keep}&cursor={start + self.hub.page_size}"
            headers["Link"] = f'<{url}>; rel="next"'
        self._json(page, headers)

    def _paths(self, repository: Repository, wanted: Sequence[str]) -> list[dict]:
        found = []
        for path in wanted:
            if path in repository.entries:
                found.append(repository.entries[path].listed())
            elif any(name.startswith(f"{path}/") for name in repository.entries):
                found.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        return found

    def _refuse(self, token: str | None) -> None:
        if token is None:
            return self._error(401, "GatedRepo", "Access to this dataset is restricted. Please log in.")
        return self._error(403, "GatedRepo", "Access is restricted and you are not in the list.")

    # --- files

    def _resolve(self, raw: str, token: str | None) -> None:
        parts = raw.split("/")
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if kind == "dataset" else parts
        repository, moved = self.hub.find(kind, "/".join(parts[:2]))
        if repository is None:
            return self._error(404, "RepoNotFound", "Repository not found")
        if moved:
            prefix = "/datasets" if kind == "dataset" else ""
            return self._redirect(307, f"{prefix}/{repository.id}/{'/'.join(parts[2:])}")
        if repository.gated and token != TOKEN:
            return self._refuse(token)
        commit = {"X-Repo-Commit": repository.commit}
        if not repository.has(unquote(parts[3])):
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        entry = repository.entries.get(unquote("/".join(parts[4:])))
        if entry is None:
            return self._error(404, "EntryNotFound", "Entry not found", commit)
        headers = commit | {"X-Linked-Etag": f'"{entry.etag}"', "X-Linked-Size": str(entry.size)}
        if entry.sha256:
            path = quote(f"{repository.kind}/{repository.id}/{entry.path}")
            return self._redirect(302, f"{self.hub.content}/{path}", headers)
        self._send(entry, headers)

    def _content(self, path: str) -> None:
        kind, owner, name, *rest = path.split("/")
        repository, _ = self.hub.find(kind, f"{owner}/{name}")
        entry = repository.entries.get("/".join(rest)) if repository else None
        return self._send(entry, {}) if entry else self._error(404, None, "no such object")

    def _send(self, entry: Entry, headers: dict[str, str]) -> None:
        fault = self.hub.fault_of(f"{unquote(self.path)} {entry.path}") if self.command == "GET" else None
        if fault and fault.kind == "status":
            return self._status(fault)
        if fault and fault.kind == "slow":
            time.sleep(fault.seconds)
        data, status = entry.file.read_bytes(), 200
        if fault and fault.kind == "corrupt":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) if last else len(data) - 1
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            end = min(end, len(data) - 1)
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
            data, status = data[start : end + 1], 206
        if fault and fault.kind == "short":
            data = data[: max(1, len(data) // 2)]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("ETag", f'"{entry.etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.kind == "drop":
            self.wfile.write(data[: fault.after])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault and fault.kind == "trickle":
            for start in range(0, len(data), 1000):
                self.wfile.write(data[start : start + 1000])
                self.wfile.flush()
                time.sleep(fault.seconds)
            return
        self.wfile.write(data)

    # --- answers

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _redirect(self, status: int, to: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _error(
        self, status: int, code: str | None, words: str, headers: Mapping[str, str] | None = None
    ) -> None:
        data = json.dumps({"error": words}).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", words)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _status(self, fault: Fault) -> None:
        wait = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
        self._error(fault.code, None, "try again later", wait)


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.miniature import build

    parser = argparse.ArgumentParser(prog="python -m tests.hub_server", description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where the miniature is built (a temporary folder)")
    parser.add_argument("--port", type=int, default=0, help="of the API (a free one)")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        HubServer(build(options.folder or Path(folder)), port=options.port) as hub,
    ):
        print(f"export HF_ENDPOINT={hub.endpoint} HF_TOKEN={TOKEN}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
