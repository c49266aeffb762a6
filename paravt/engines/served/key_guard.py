"""An ASGI middleware for the vLLM server: no path is answered without the key, but /health.

vLLM's own check covers the paths under /v1 and /inference. Those that replace weights, pause the engine or
call its methods lie elsewhere, and anybody who reaches the port could use them. The key is VLLM_API_KEY, as
for vLLM itself; without one nothing is answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
import hmac
import os
from typing import Any

OPEN = ("/health",)
ASGI = Callable[..., Awaitable[Any]]


class KeyGuard:
    """Answers 401 unless the request carries `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGI) -> None:
        self.app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self.wanted = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: dict, receive: ASGI, send: ASGI) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._may(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": "this server answers with its key only"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: dict) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self.wanted is not None and hmac.compare_digest(given, self.wanted)
