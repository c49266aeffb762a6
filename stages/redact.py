"""Secrets are not shown: what the environment calls a token, password, secret, key, auth or connection
string; passwords and signatures in URLs; what stands after `Authorization:`, `Bearer` or `AccountKey=`.

    redact(text)    a text without them
    cover()         the same for all that this process prints, tracebacks and log lines included

Tracking redacts what it records before it is on disk, so nothing that is sent later holds a secret either.
"""

from __future__ import annotations

import os
from pathlib import Path
import re
import sys
from typing import Any, TextIO

SECRET_NAME = re.compile(
    r"TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY|CREDENTIAL|CONNECTION_STRING|AUTHORIZATION|(?:^|_)KEY$"
    r"|(?:^|_)O?AUTH(?!_(?:SOCK|TYPE|METHOD|MODE|FILE|PATH|URL)$)(?:_|$)",  # those say how or where
    re.IGNORECASE,
)
IN_URL = re.compile(r"(?<=://)[^/\s@\"']+(?=@)")
KNOWN_FORMS = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
# what leads up to a secret stays; a signature has a digit and some length, other words have not
AFTER = re.compile(
    r"""(authorization\\?["']?\s*[:=]\s*\\?["']?(?:bearer|basic|token|digest|negotiate)\s+)[^\s"',;\\]+"""
    r"""|(\bbearer\s+)(?=\S*\d)[\w.~+/=-]{16,}"""
    r"""|(\b(?:AccountKey|SharedAccessKey)=)[^\s"',;&\\]+"""
    r"""|((?:signature|\bsig)=)(?=[\w+/=-]*[\d%])[\w+/%=-]{16,}""",
    re.IGNORECASE,
)
SHORTEST = 6  # below that a value is a word, and hiding it would spoil the text
STARS = "***"
LINE = 200  # of an error in one line


def secrets() -> list[str]:
    """The secret values of this environment, longest first: one may hold another."""
    found = {
        value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= SHORTEST and not _harmless(value)
    }
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """`text` with each secret of this environment, each `user:password@` of a URL, what has the form of a
    well-known token, and what stands where a secret does, as three stars.
    """
    for value in secrets():
        text = text.replace(value, STARS)
    text = AFTER.sub(lambda found: next(filter(None, found.groups())) + STARS, text)
    return KNOWN_FORMS.sub(STARS, IN_URL.sub(STARS, text))


def short(error: BaseException) -> str:
    """The first line of what an error says, without secrets; its kind if it says nothing."""
    return next(iter(redact(str(error)).splitlines()), "")[:LINE] or type(error).__name__


def redact_all(value: Any) -> Any:
    """The same for each string inside a JSON value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(part) for part in value]
    return value


def redact_file(path: Path) -> None:
    """Rewrite a text file that holds a secret; other files stay as they are."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return  # an image, weights
    clean = redact(text)
    if clean != text:
        path.write_bytes(clean.encode("utf-8"))


class Covered:
    """A text stream that redacts what is written to it; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cover() -> None:
    """Redact this process's output from here on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Covered):
            setattr(sys, name, Covered(stream))


def _harmless(value: str) -> bool:
    """A switch or a number (TOKENIZERS_PARALLELISM=false, MAX_TOKENS=1000000) is no secret."""
    return value.lower() in ("false", "true") or value.replace(".", "", 1).isdigit()
