"""A client of `POST /v1/chat/completions`, as many servers speak it: asks, waits its turn, tries again.

    lost       no connection, timeout, 408, 409, 425, 429, 5xx    the same is sent again, later
    refused    other 4xx                                          this request fails, others go on
    closed     401, 403, 404                                      nothing can be asked here

A `Retry-After` of the server is kept to. Keys come from the caller, who has them from the environment. A
login in the URL (`https://user:password@host/v1`) is sent as HTTP Basic and stands in no message or result.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
import json
import random
from typing import Any

import aiohttp

from paravt.engines.base import EngineError, Refused
from paravt.engines.exchange import Lost, exchange, parsed, pause_s, said, split_login

FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_TOLD_S = 0.5, 20.0, 120.0


@dataclass(frozen=True)
class ChatReply:
    """`text` is the message's content, "" if it has none; `message` is the whole message."""

    text: str
    finish_reason: str
    message: dict[str, Any]


class ChatClient:
    """Asks one model at one URL, `in_flight` requests at a time. `key_name` is where its key comes from.

    Raises ValueError for a URL that is none, or that has a login beside a key.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        key: str = "",
        key_name: str = "",
        retries: int = 4,
        timeout_s: float = 600.0,
        in_flight: int = 16,
    ) -> None:
        url, login = split_login(url.strip())
        self.url = base_url(url)
        if login and key:
            raise ValueError(f"{self.url} is given a login in its URL and a key ({key_name}); leave one out")
        self.model = model
        self.retries, self.timeout_s, self.in_flight = retries, timeout_s, in_flight
        self._authorization = login or (f"Bearer {key}" if key else "")
        self._refused = "login in its URL" if login else f"key; put its key into {key_name or 'the key'}"
        self._limit_name = "max_tokens"
        self._jitter = random.Random(0)

    def session(self) -> aiohttp.ClientSession:
        """A session for one event loop; the caller closes it."""
        headers = {"Authorization": self._authorization} if self._authorization else {}
        return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=self.in_flight))

    async def find_model(self, http: aiohttp.ClientSession) -> str:
        """The model's name as the server has it. Raises EngineError if it is not served, or not one alone."""
        try:
            data = await self._call(http, "GET", "/models")
        except EngineError as error:
            if self.model and not isinstance(error, Lost):
                return self.model  # not every endpoint has a list
            raise
        served = [item.get("id") for item in data.get("data") or () if isinstance(item, dict)]
        if self.model is None and len(served) == 1:
            self.model = str(served[0])
        if self.model not in served and (served or self.model is None):
            raise EngineError(
                f"{self.url} serves {', '.join(map(str, served)) or 'nothing'}; name one of them"
            )
        return self.model

    async def complete(
        self, http: aiohttp.ClientSession, messages: list[dict], max_tokens: int, **parameters: Any
    ) -> ChatReply:
        """One completion. Raises Lost, Refused, or EngineError where nothing can be asked."""
        body = {"model": self.model, "messages": messages, **parameters}
        limit, other = self._limit_name, "max_completion_tokens"
        try:
            data = await self._call(http, "POST", "/chat/completions", body | {limit: max_tokens})
        except Refused as error:
            if other not in str(error) or limit == other:
                raise
            self._limit_name = other  # newer models of OpenAI know the limit by this name only
            data = await self._call(http, "POST", "/chat/completions", body | {other: max_tokens})
        try:
            [choice] = data["choices"]
            message = choice["message"]
            content = message.get("content")
            return ChatReply(_text(content), str(choice.get("finish_reason") or "stop"), message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"{self.url} gave no completion but {json.dumps(data)[:200]}") from error

    async def _call(
        self, http: aiohttp.ClientSession, method: str, path: str, body: dict | None = None
    ) -> dict[str, Any]:
        for attempt in range(self.retries + 1):
            try:
                return await self._once(http, method, path, body)
            except Lost as error:
                if attempt == self.retries:
                    raise Lost(error.reason, f"{error}, {attempt + 1} times", error.reached) from error
                wait_s = pause_s(attempt, FIRST_WAIT_S, LONGEST_WAIT_S, self._jitter)
                await asyncio.sleep(wait_s if error.wait_s is None else min(error.wait_s, LONGEST_TOLD_S))
        raise AssertionError("unreachable")

    async def _once(
        self, http: aiohttp.ClientSession, method: str, path: str, body: dict | None
    ) -> dict[str, Any]:
        status, text = await exchange(http, method, self.url + path, self.timeout_s, json=body)
        if status in (401, 403):
            raise EngineError(f"{self.url} refuses the {self._refused}")
        if status == 404:
            raise EngineError(
                f"{self.url}{path} is not known there, or not the model {self.model}: {said(text)}"
            )
        if status >= 300:
            raise Refused(f"{self.url} refuses it ({status}): {said(text)}")
        data = parsed(self.url + path, text)
        if not isinstance(data, dict):
            raise Refused(f"{self.url}{path} answered {text[:80]!r}, which is no object")
        return data


def base_url(url: str) -> str:
    """The URL up to `/v1`. Raises ValueError for one that is not http(s) or has an @, as half a login has."""
    url = url.strip().rstrip("/").removesuffix("/chat/completions")
    if not url.startswith(("http://", "https://")) or url.endswith(":/") or "@" in url:
        shown = url.rpartition("@")[2]
        raise ValueError(f"{shown!r} is no endpoint; write for example http://localhost:8000/v1")
    return (
        url
        if url.rpartition("/")[2].startswith("v") and url.rpartition("/")[2][1:].isdigit()
        else f"{url}/v1"
    )


def _text(content: Any) -> str:
    """The text of a content that is a string, nothing, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
