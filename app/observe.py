"""What shows the engine at work: the live page and its feed, the trace, the metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from app.api_error import ApiError, invalid
from app.live import ANSWER_SECONDS, EngineView, LiveFeed, TooManyWatchersError, ask_all
from engine_actor.chrome_trace import chrome_trace
from engine_actor.history import HISTORY_SECONDS
from engine_actor.metrics import exposition
from engine_actor.step_wire import decode_step

WEB = Path(__file__).parent / "web"
LIVE_TYPE = "application/x-ndjson"
MAX_WATCHERS = 16
"""Live pages open at once, per replica."""
MAX_TRACES = 2
"""Traces built at once, per replica: a long one takes seconds and tens of megabytes."""
TRACE_SECONDS = 20.0
"""An engine that takes longer to send its steps is left out: minutes of them take it seconds."""
PAGE_HEADERS = {
    # The page needs nothing from anywhere else, and nobody may put it into a frame.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The page's own files, with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # noqa: ANN401 - see StaticFiles
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


class LiveStream(StreamingResponse):
    """The feed of one page, which it leaves however the connection ends."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._watcher = feed.enter()
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(feed.read(self._watcher), media_type=LIVE_TYPE, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave(self._watcher)


class Observatory:
    """Routes for people and tools that look. `authorize` raises ApiError for a wrong or missing key.

    `figures` are those of the HTTP side, for /metrics.
    """

    def __init__(
        self,
        views: Callable[[], Mapping[str, EngineView]],
        hello: Callable[[], Mapping[str, Any]],
        authorize: Callable[[Mapping[str, str]], object],
        figures: Callable[[], Awaitable[Sequence[Metric]]],
    ) -> None:
        self._views = views
        self._authorize = authorize
        self._figures = figures
        self._feed = LiveFeed(views, hello, MAX_WATCHERS)
        self._traces = 0

    def install(self, app: FastAPI) -> None:
        """The page at `/`, its files under `/web`, `/live`, `/trace` and `/metrics`."""
        routes: dict[str, Callable[..., Any]] = {
            "/": self.page,
            "/live": self.live,
            "/trace": self.trace,
            "/metrics": self.metrics,
        }
        for path, endpoint in routes.items():
            app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
        app.mount("/web", PageFiles(directory=WEB))

    async def page(self) -> Response:
        """GET /: the page holds no data; what it shows comes from /live, with a key if there are keys."""
        return FileResponse(WEB / "index.html", headers=PAGE_HEADERS)

    async def live(self, http: Request) -> Response:
        """GET /live: lines of JSON, see LiveFeed."""
        self._authorize(http.headers)
        if http.method == "HEAD":
            return Response(media_type=LIVE_TYPE)
        try:
            return LiveStream(self._feed)
        except TooManyWatchersError as error:
            raise ApiError(503, f"{error}.", code="too_many_watchers", headers={"Retry-After": "5"}) from None

    async def trace(self, http: Request) -> Response:
        """GET /trace?seconds=N: the last N seconds of all engines as Chrome trace JSON."""
        self._authorize(http.headers)
        seconds = _seconds(http.query_params.get("seconds", "60"))
        if http.method == "HEAD":
            return Response(media_type="application/json")
        if self._traces >= MAX_TRACES:
            raise ApiError(
                429,
                f"{MAX_TRACES} traces are being built already, which is the limit; try again in a moment.",
                code="too_many_traces",
                headers={"Retry-After": "2"},
            )
        self._traces += 1
        try:
            lines = await ask_all(self._views(), lambda view: view.history(seconds), TRACE_SECONDS)
            body = await asyncio.to_thread(_trace_json, lines)
        finally:
            self._traces -= 1
        headers = {"Content-Disposition": 'attachment; filename="slotserve-trace.json"'}
        return Response(body, media_type="application/json", headers=headers)

    async def metrics(self, http: Request) -> Response:
        """GET /metrics: the figures of all engines, whichever replica is asked."""
        self._authorize(http.headers)
        families, own = await asyncio.gather(
            ask_all(self._views(), lambda view: view.figures(), ANSWER_SECONDS), self._figures()
        )
        text = exposition([*families.values(), own])
        # Names are written as they always were, which is this format and not the newest one.
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _seconds(text: str) -> float:
    """The window asked for. Raises ApiError 400, naming the limit, for anything absurd."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= HISTORY_SECONDS:
        raise invalid(
            f"Invalid 'seconds': {text[:40]!r}; a number above 0 and up to {HISTORY_SECONDS} is possible, "
            "since steps are kept for so long",
            "seconds",
        )
    return seconds


def _trace_json(lines: Mapping[str, list[bytes]]) -> bytes:
    steps = {
        int(name.rsplit("-", 1)[-1]): [decode_step(line) for line in encoded]
        for name, encoded in lines.items()
    }
    return json.dumps(chrome_trace(steps), separators=(",", ":")).encode()
