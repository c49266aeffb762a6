"""One exchange with a server over HTTP: what it answered, or that the same may be sent again.

    lost    no connection, timeout, 408, 409, 425, 429, 5xx

Every other status is the caller's to read. Redirections are not followed: a key travels with each request.
"""

from __future__ import annotations

import base64
import json
import random
import re
from typing import Any
from urllib.parse import unquote

import aiohttp

from paravt.engines.base import EngineError

CONNECT_TIMEOUT_S = 10.0
AGAIN = (408, 409, 425, 429)
_LOGIN = re.compile(r"(?<=://)[^/?#]+@")


class Lost(EngineError):
    """Nothing came back, or an error of the server. The same may be sent again.

    `reason` is counted; `reached` if there was a connection; `wait_s` is how long the server wants to be let
    alone, None if it does not say.
    """

    def __init__(self, reason: str, message: str, reached: bool = True, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.reached, self.wait_s = reason, reached, wait_s


def split_login(url: str) -> tuple[str, str]:
    """The URL without `user:password@`, and that as an Authorization header's value, "" if it has none."""
    found = _LOGIN.search(url)
    if found is None:
        return url, ""
    login = base64.b64encode(unquote(found[0].removesuffix("@")).encode()).decode()
    return _LOGIN.sub("", url, count=1), f"Basic {login}"


async def exchange(
    http: aiohttp.ClientSession, method: str, url: str, timeout_s: float, **content: Any
) -> tuple[int, str]:
    """Status and text of the answer; `content` goes to aiohttp as it is. Raises Lost."""
    limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with http.request(method, url, timeout=limits, allow_redirects=False, **content) as answer:
            status, text = answer.status, await answer.text()
            told = answer.headers.get("Retry-After", "")
    except TimeoutError as error:
        raise Lost("timeout", f"{url} did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        words = f"{url} cannot be reached ({type(error).__name__}: {error})"
        reached = not isinstance(error, aiohttp.ClientConnectorError)
        raise Lost("connection lost", words, reached) from error
    if status in AGAIN or status >= 500:
        wait_s = float(told) if told.isascii() and told.isdigit() else None
        raise Lost(f"HTTP {status}", f"{url} answered {status}: {said(text)}", wait_s=wait_s)
    return status, text


def pause_s(attempt: int, first_s: float, longest_s: float, jitter: random.Random) -> float:
    """How long to wait before the next try: twice as long each time, give or take a half."""
    return min(longest_s, first_s * 2**attempt) * jitter.uniform(0.5, 1.5)


def parsed(url: str, text: str) -> Any:
    """The JSON of an answer. Raises Lost for what is none: a proxy may have spoken."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Lost("no JSON", f"{url} answered {text[:80]!r}, which is no JSON") from error


def said(text: str) -> str:
    """The message of an error answer, short."""
    try:
        data = json.loads(text)
        error = data.get("error", data) if isinstance(data, dict) else data
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:300]
