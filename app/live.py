"""Steps on their way to live pages: engines are asked only while somebody looks, once per replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from prometheus_client.metrics_core import Metric

from engine_actor.step_wire import page_message

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""An engine that takes longer to answer, such as a frozen one, is left out of what is shown of all."""
REFRESH_SECONDS = 0.4
"""Each question takes some milliseconds of the engine's cores (`python -m bench watching`)."""
RETRY_SECONDS = 1.0
BACKLOG_SECONDS = 60.0
"""Steps a page gets when it opens."""
HEARTBEAT_SECONDS = 1.0
"""Silence a page gets at most, so that its clock runs on while the engine is idle."""
LAG = 100
"""Messages a page may lag behind before it is dropped; it connects again and starts afresh."""


@runtime_checkable
class EngineView(Protocol):
    """One engine as those see it who only look. Raises ConnectionError once it is gone."""

    async def news(self, since: int) -> tuple[int, bytes]:
        """The newest step's number, and a message for pages: the steps after `since`.

        The last ones of them, where there are very many; -1 asks for the last ones in any case.
        """
        ...

    async def history(self, seconds: float) -> list[bytes]:
        """The steps of the last `seconds`, encoded by `engine_actor.step_wire`."""
        ...

    async def figures(self) -> list[Metric]:
        """Its Prometheus families."""
        ...


async def ask_all(
    views: Mapping[str, EngineView], question: Callable[[EngineView], Awaitable[T]], seconds: float
) -> dict[str, T]:
    """What each engine answers, without those that are gone or take longer than `seconds`."""
    answers: dict[str, T] = {}

    async def ask(name: str, view: EngineView) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(seconds):
                answers[name] = await question(view)

    await asyncio.gather(*(ask(name, view) for name, view in views.items()))
    return {name: answers[name] for name in views if name in answers}


class TooManyWatchersError(RuntimeError):
    """The limit on open pages is reached."""


class Watcher:
    """One open page."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue(LAG)


class LiveFeed:
    """What all pages open on this replica read. Used on one event loop."""

    def __init__(
        self,
        views: Callable[[], Mapping[str, EngineView]],
        hello: Callable[[], Mapping[str, Any]],
        max_watchers: int,
    ) -> None:
        self._views = views
        self._hello = hello
        self._max_watchers = max_watchers
        self._watchers: set[Watcher] = set()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._lookout: asyncio.Task[None] | None = None

    def enter(self) -> Watcher:
        """Let one more page in. Raises TooManyWatchersError."""
        if len(self._watchers) >= self._max_watchers:
            raise TooManyWatchersError(
                f"{self._max_watchers} live pages are open here already; close one and try again"
            )
        watcher = Watcher()
        self._watchers.add(watcher)
        self._follow_new()
        if self._lookout is None:
            self._lookout = asyncio.create_task(self._look_out())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """A page has gone; with the last one the engines are left alone."""
        self._watchers.discard(watcher)
        if not self._watchers:
            for pump in self._pumps.values():
                pump.cancel()
            self._pumps.clear()
            if self._lookout is not None:
                self._lookout.cancel()
                self._lookout = None

    async def read(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Lines of JSON for a page: what runs here, what it has done lately, then what it does."""
        yield self._hello_line()
        backlog = await ask_all(self._views(), lambda view: view.history(BACKLOG_SECONDS), ANSWER_SECONDS)
        for name, steps in backlog.items():
            yield page_message(name, steps)
        while (line := await watcher.lines.get()) is not None:
            yield line

    def _hello_line(self) -> bytes:
        return json.dumps(self._hello()).encode() + b"\n"

    def _follow_new(self) -> bool:
        new = self._views().keys() - self._pumps.keys()
        for name in new:
            self._pumps[name] = asyncio.create_task(self._pump(name))
        return bool(new)

    async def _look_out(self) -> None:
        """Show engines that come up while pages are open."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._follow_new():
                self._tell_all(self._hello_line())

    async def _pump(self, name: str) -> None:
        since, told = -1, 0.0
        while True:
            try:
                if (view := self._views().get(name)) is None:
                    raise ConnectionError(f"{name} is down")
                last, line = await view.news(since)
                if last != since or time.monotonic() - told >= HEARTBEAT_SECONDS:
                    told = time.monotonic()
                    self._tell_all(line)
                since = last
                await asyncio.sleep(REFRESH_SECONDS)
            except ConnectionError:
                since = -1
                await asyncio.sleep(RETRY_SECONDS)

    def _tell_all(self, line: bytes) -> None:
        for watcher in list(self._watchers):
            self._tell(watcher, line)

    def _tell(self, watcher: Watcher, line: bytes) -> None:
        try:
            watcher.lines.put_nowait(line)
        except asyncio.QueueFull:
            self.leave(watcher)
            watcher.lines.get_nowait()
            watcher.lines.put_nowait(None)
