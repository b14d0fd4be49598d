"""A small OpenAI-compatible server of made-up tokens, and of every way in which a stream can go wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Behaviour = Literal["well", "breaks off", "error event", "refuses", "first one late"]


class FakeServer:
    """`behaviour` decides how each completion goes; `seen` holds (headers, body) of each.

    One of several prompts is answered as if it had one. It is never the late one.
    """

    def __init__(self, *, delay: float = 0.002) -> None:
        self.behaviour: Behaviour = "well"
        self.delay = delay
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.hung_up = 0
        self._first = threading.Lock()
        server = self

        class Handler(_Handler):
            fake = server

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def take_first(self) -> bool:
        """True to whoever asks first."""
        return self._first.acquire(blocking=False)

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that resets its connection is no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._json(404, {"error": {"message": "no such path"}})
            return
        self._json(200, {"object": "list", "data": [{"id": "toy", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        several = isinstance(body["prompt"][0], list)
        if self.fake.behaviour == "first one late" and not several and self.fake.take_first():
            time.sleep(0.2)
        self.fake.seen.append((dict(self.headers.items()), body))
        if self.fake.behaviour == "refuses":
            self._json(429, {"error": {"message": "the queue is full", "type": "overloaded"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(body["max_tokens"])
        except (BrokenPipeError, ConnectionResetError):
            self.fake.hung_up += 1
            self.close_connection = True

    def _stream(self, tokens: int) -> None:
        for index in range(tokens):
            if index == tokens // 2 and self.fake.behaviour == "breaks off":
                self.close_connection = True
                return
            if index == tokens // 2 and self.fake.behaviour == "error event":
                self._event({"error": {"message": "the engine failed"}})
                self._chunk(b"")
                return
            self._event({"choices": [{"index": 0, "text": f" {index}", "token_ids": [index]}]})
            time.sleep(self.fake.delay)
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
