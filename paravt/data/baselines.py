"""The files that hold the prompts of published baselines, at their pinned commits.

    FOLDER/NAME/path        the file as it is in the repository
    FOLDER/NAME/source.json repository, commit, and the SHA-256 of each file

A file of a commit never changes, so one that is there with the recorded hash is not fetched again. The prompt
is cut out of the files before the fetch counts as done: one that is not what was expected is told at once.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import http.client
import json
import os
from pathlib import Path
import time
import urllib.error
from urllib.parse import quote
import urllib.request

from paravt.protocol.families import FAMILIES, FOLDER, family_of, load
from paravt.protocol.upstream import Family, UpstreamError

VARIABLE = "PARAVT_RAW_URL"
RAW = "https://raw.githubusercontent.com"
MAX_BYTES = 4 * 2**20
TRIES, WAIT_S, TIMEOUT_S = 4, 1.0, 30.0


def fetch_prompts(names: Sequence[str], folder: Path = FOLDER, wait_s: float = WAIT_S) -> list[Path]:
    """The files of each family; PARAVT_RAW_URL names another host of raw files. Raises UpstreamError."""
    return [path for name in names for path in _fetch(family_of(name), folder, wait_s)]


def _fetch(family: Family, folder: Path, wait_s: float) -> list[Path]:
    home = folder / family.name
    known = _known(home, family)
    paths, hashes = [], {}
    for file in family.files:
        path = home / file
        if not path.is_file() or known.get(file) != _sha256(path.read_bytes()):
            content = _download(f"{family.repository}/{family.commit}/{file}", wait_s)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.writing")
            aside.write_bytes(content)
            aside.replace(path)
        hashes[file] = _sha256(path.read_bytes())
        paths.append(path)
    load(family.name, folder)
    record = {"repository": family.repository, "commit": family.commit, "sha256": hashes}
    (home / "source.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return paths


def _known(home: Path, family: Family) -> dict[str, str]:
    try:
        record = json.loads((home / "source.json").read_text(encoding="utf-8"))
        return record["sha256"] if record["commit"] == family.commit else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _download(path: str, wait_s: float) -> bytes:
    url = f"{os.environ.get(VARIABLE, RAW).rstrip('/')}/{quote(path)}"
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                content = answer.read(MAX_BYTES + 1)
                if len(content) > MAX_BYTES:
                    raise UpstreamError(f"{url} has more than {MAX_BYTES} bytes; it is not the file expected")
                return content
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise UpstreamError(f"{url} answers {error.code}; is {VARIABLE} right?") from error
            failure: Exception = error
        except (OSError, http.client.HTTPException) as error:
            failure = error
        time.sleep(wait_s * 2**attempt)
    raise UpstreamError(f"{url} cannot be fetched ({failure}); try again with a network")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


__all__ = ["FAMILIES", "fetch_prompts"]
