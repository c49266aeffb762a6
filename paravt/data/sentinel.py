"""Sentinel paths: published rows name their media by virtual roots, and here those become real files.

    longvt_source/<source>/<rest>    museg/charades/<id>.mp4
    selfqa/<id>.mp4                  museg/et_instruct_164k/<id>.mp4

A root is a bucket (`longvt_source/<source>` is one per source). A path may come as it is or as a `file://`
URI, which is decoded exactly once. `Resolver` looks each one up, once, and counts what is missing by bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
import json
from typing import Any

from paravt.data.media import safe_path
from paravt.data.published import SENTINELS
from paravt.video import spellings

SHOWN = 5
ELSEWHERE = "elsewhere"


class RowError(ValueError):
    """A published row that cannot be used; the message is the reason, the same for all rows of its kind."""


@dataclass(frozen=True)
class Sentinel:
    """A media path of a row: its bucket, and the paths under the media root that it may mean, best first."""

    bucket: str
    paths: tuple[str, ...]


def read_sentinel(url: str) -> Sentinel | None:
    """The sentinel that a path or URI spells; None if it is under none of the virtual roots or leaves it."""
    paths, bucket = [], None
    for spelling in spellings(url):
        path = spelling.removeprefix("/") if "://" in url else spelling
        root = next((root for root in SENTINELS if path.startswith(f"{root}/")), None)
        try:
            parts = safe_path(path).parts
        except ValueError:
            continue
        if root is None or (root == "longvt_source" and len(parts) < 3):
            continue
        paths.append(path)
        bucket = bucket or ("/".join(parts[:2]) if root == "longvt_source" else root)
    return Sentinel(bucket, tuple(paths)) if bucket else None


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a row: a list, JSON text of one, or either wrapped in {"messages": ...}.

    Each has a role and a list of content items without null keys. Raises RowError if they do not.
    """
    for _ in range(4):  # text in an object in text is published; deeper is not
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise RowError("messages are not JSON") from None
        if isinstance(value, Mapping) and "messages" in value:
            value = value["messages"]
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise RowError("messages are not a list of objects")
    return [{"role": item.get("role"), "content": _items(item.get("content"))} for item in value]


def _items(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(item, Mapping) for item in content):
        raise RowError("a message's content is neither a text nor a list of items")
    return [{key: value for key, value in item.items() if value is not None} for item in content]


def text_of(message: Mapping[str, Any]) -> str:
    """The text items of a message, joined by newlines."""
    return "\n".join(str(item["text"]) for item in message["content"] if "text" in item)


def media_of(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, url) of each video or image of a message, in order."""
    for item in message["content"]:
        for kind in ("video", "image"):
            value = item.get(f"{kind}_url", item.get(kind))
            url = value.get("url") if isinstance(value, Mapping) else value
            if isinstance(url, str):
                yield kind, url


def row_media(row: Mapping[str, Any]) -> list[str]:
    """The media that the question of a row is about; frames that a tool returned are not needed.

    Raises RowError for messages that cannot be read.
    """
    for message in read_messages(row.get("messages")):
        if message["role"] == "user":
            return [url for _, url in media_of(message)]
    raise RowError("it has no user message")


def videos_of(row: Mapping[str, Any]) -> list[str]:
    """The videos of an RL row: a list of paths or of {"video": path}, or JSON text of one."""
    videos = row.get("videos")
    if isinstance(videos, str):
        try:
            videos = json.loads(videos)
        except ValueError:
            videos = [videos]
    found = [item.get("video") if isinstance(item, Mapping) else item for item in videos or ()]
    if not all(isinstance(video, str) for video in found):
        raise RowError("a video of the row is not a path")
    return found


@dataclass
class Resolver:
    """Looks sentinels up among the paths that are there, and keeps count by bucket.

    `known` are paths under the media root; `buckets` the chosen ones, None for all.
    """

    known: Iterable[str]
    buckets: frozenset[str] | None = None
    _asked: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = frozenset(self.known)

    def look(self, url: str) -> str | None:
        """The path of the media file, None if there is none to be had."""
        if url not in self._asked:
            self._asked[url] = self._look(url)
        return self._asked[url][1]

    def find(self, url: str) -> str:
        """The path of the media file. Raises RowError for one that is missing, not chosen or no sentinel."""
        if (path := self.look(url)) is not None:
            return path
        bucket = self._asked[url][0]
        if bucket == ELSEWHERE:
            raise RowError("its media are named by no known root")
        if self.buckets is not None and bucket not in self.buckets:
            raise RowError(f"bucket {bucket} is not chosen")
        raise RowError(f"media missing in {bucket}")

    def _look(self, url: str) -> tuple[str, str | None]:
        sentinel = read_sentinel(url)
        if sentinel is None:
            return ELSEWHERE, None
        chosen = self.buckets is None or sentinel.bucket in self.buckets
        found = next((path for path in sentinel.paths if path in self.known), None)
        return sentinel.bucket, found if chosen else None

    def report(self) -> dict[str, dict[str, Any]]:
        """By bucket: distinct media named, missing, and the first that are missing."""
        named = Counter(bucket for bucket, _ in self._asked.values())
        missing: dict[str, list[str]] = {}
        for url, (bucket, path) in self._asked.items():
            if path is None:
                missing.setdefault(bucket, []).append(url)
        return {
            bucket: {
                "named": named[bucket],
                "missing": len(missing.get(bucket, ())),
                "examples": sorted(missing.get(bucket, ()))[:SHOWN],
            }
            for bucket in sorted(named)
        }
