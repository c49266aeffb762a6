"""An OpenAI-compatible endpoint on loopback: models and chat completions, with faults on request.

    with ChatServer(lambda body: "text") as server:
        server.url, server.requests
        server.fail(Fault(status=500), Fault(drop=True))       the next requests, in turn

The reply may be a text, a dict (the whole choice), or a (status, body) pair.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import threading
import time
from typing import Any


@dataclass(frozen=True)
class Fault:
    status: int = 500
    message: str = "not now"
    drop: bool = False
    wait_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


class ChatServer:
    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Any],
        models: tuple[str, ...] | None = ("video-8b",),
        key: str = "",
        login: str = "",
    ) -> None:
        self.reply, self.models = reply, models
        basic = f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""
        self.wanted = f"Bearer {key}" if key else basic
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self._faults: list[Fault] = []
        self._guard = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: object) -> None:
                pass

            def do_GET(self) -> None:
                if not outer._allowed(self):
                    return
                if outer.models is None:
                    return outer._send(self, 404, {"error": {"message": "no list here"}})
                outer._send(self, 200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                outer._complete(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def fail(self, *faults: Fault) -> None:
        with self._guard:
            self._faults += faults

    def _complete(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if not self._allowed(handler):
            return
        with self._guard:
            self.requests.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self._faults.pop(0) if self._faults else None
        try:
            if fault:
                time.sleep(fault.wait_s)
                if fault.drop:
                    handler.close_connection = True
                    handler.connection.close()
                    return
                self._send(handler, fault.status, {"error": {"message": fault.message}}, fault.headers)
                return
            answer = self.reply(body)
            if isinstance(answer, tuple):
                self._send(handler, *answer)
                return
            choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
            choice = choice | answer if isinstance(answer, dict) else choice
            self._send(handler, 200, {"model": body["model"], "choices": [{"index": 0} | choice]})
        finally:
            with self._guard:
                self._at_once -= 1

    def _allowed(self, handler: BaseHTTPRequestHandler) -> bool:
        if not self.wanted or handler.headers.get("Authorization") == self.wanted:
            return True
        self._send(handler, 401, {"error": {"message": "wrong key"}})
        return False

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, data: Any, headers: dict[str, str] | None = None
    ) -> None:
        content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        with suppress(ConnectionError):
            handler.send_response(status)
            for name, value in (headers or {}).items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
