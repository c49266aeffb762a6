"""What is known of a media file: how long it lasts, or why it cannot be used.

A file is opened, its last frame read, and what came of it is kept under the media root by its content and by
what read it (`reader_version`): a video is judged once, by whichever worker comes first. Where there are too many, a sample of `opened` files
(chosen by a hash of their content, so the same on every machine) is opened, and of the others the duration
that the container declares is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
import hashlib
import json
import math
from pathlib import Path

import av

from paravt.data.catalogue import at_once
from paravt.data.media import MediaStore, on_this_machine
from paravt.data.schema import VideoFacts
from paravt.hashing import stable_hash
from paravt.video import VideoError, open_video

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
STILL_S = 0.04  # a still picture is a video of one frame, shown as long as FFmpeg shows it


def learn_facts(
    store: MediaStore,
    files: Mapping[str, str],
    opened: int | None,
    timeout_s: float,
    workers: int,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> dict[str, VideoFacts]:
    """Facts of each file. `files` maps a path, as tables write it, to the SHA-256 of its content."""
    contents = sorted(set(files.values()), key=lambda sha256: (stable_hash("opened", sha256), sha256))
    chosen = set(contents if opened is None else contents[:opened])
    places = {sha256: path for path, sha256 in sorted(files.items())}
    done: list[str] = []

    def learn(sha256: str) -> VideoFacts:
        place = Path(on_this_machine(places[sha256]))
        facts = _judged(store, sha256, place, timeout_s) if sha256 in chosen else declared(place)
        done.append(sha256)
        progress(len(done), len(contents), "videos looked at")
        return facts

    found = dict(zip(contents, at_once(learn, contents, workers), strict=True))
    return {path: found[sha256] for path, sha256 in files.items()}


@cache
def reader_version() -> str:
    """A hash of what reads files, our source and FFmpeg: another one may judge the same file otherwise."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(json.dumps([av.__version__, av.library_versions], sort_keys=True).encode())
    for path in [root / "video.py", *sorted((root / "reading").glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def examine(path: str | Path, timeout_s: float) -> VideoFacts:
    """Open a file and read its first and last frame."""
    try:
        with open_video(path, timeout_s=timeout_s) as video:
            video.frames_at([0.0, float(video.times_s[-1])])
            return VideoFacts(duration_s=float(video.duration_s))
    except VideoError as error:
        return VideoFacts(problem=f"{error.reason}: {Path(path).name}")


def declared(path: str | Path) -> VideoFacts:
    """What the container says, without decoding anything."""
    try:
        with av.open(str(path), timeout=30.0) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                return VideoFacts(problem=f"no_video: {Path(path).name}")
            if str(path).lower().endswith(IMAGES):
                return VideoFacts(duration_s=STILL_S)
            seconds = container.duration / av.time_base if container.duration else math.nan
    except (av.error.FFmpegError, OSError):
        return VideoFacts(problem=f"undecodable: {Path(path).name}")
    if not (math.isfinite(seconds) and seconds > 0):
        return VideoFacts(problem=f"no duration: {Path(path).name}")
    return VideoFacts(duration_s=float(seconds))


def _judged(store: MediaStore, sha256: str, place: Path, timeout_s: float) -> VideoFacts:
    kept = store.root / "facts" / reader_version() / sha256[:2] / f"{sha256}.json"
    try:
        data = json.loads(kept.read_text(encoding="utf-8"))
        return VideoFacts(data["duration_s"], data["problem"])
    except (OSError, ValueError, KeyError):
        facts = examine(place, timeout_s)
    if facts.problem is None or not facts.problem.startswith(("timeout", "missing")):
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = store.scratch()
        text = json.dumps({"duration_s": facts.duration_s, "problem": facts.problem})
        aside.write_text(text, encoding="utf-8")
        aside.replace(kept)
    return facts
