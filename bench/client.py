"""A workload over HTTP: streamed completions from any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import httpx

from bench.report import Advance, BenchError
from bench.stream import CompletionStream
from bench.timeline import Timeline, Timelines
from bench.workload import Workload

CONNECT_TIMEOUT = 10.0
SILENCE_TIMEOUT = 300.0
"""Seconds without a byte after which a request counts as failed: a full queue is silent for long."""


@dataclass(frozen=True)
class Server:
    """Where to send, and as whom."""

    url: str
    api_key: str | None = None

    def headers(self, tenant: str) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"X-Tenant-Id": tenant, **key}

    def model(self) -> str:
        """The first model it serves. Raises BenchError when nobody answers."""
        try:
            answer = httpx.get(f"{self.url}/v1/models", headers=self.headers("default"), timeout=10)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise BenchError(f"{self.url}/v1/models answered {error.response.status_code}") from error
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise BenchError(f"no OpenAI-compatible server at {self.url}: {error}") from error


def drive(
    server: Server, workload: Workload, *, in_turn: bool = False, advance: Advance | None = None
) -> Timelines:
    """Send each item when it is due and stream its answer; `advance` counts events, about one a token.

    `in_turn`: and not before the server has begun to answer the item before it, so that items due at
    once arrive in one order, every time.

    A request that fails keeps the tokens it got and says why in its timeline.
    """
    return asyncio.run(_drive(server, workload, in_turn, advance))


async def _drive(server: Server, workload: Workload, in_turn: bool, advance: Advance | None) -> Timelines:
    model = server.model()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE_TIMEOUT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        run = Timelines.of(workload, time.time())
        answers = [_Answer(timeline) for timeline in run.requests]
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(answer.receive(session, server, model, advance))
                if in_turn:
                    await answer.begun.wait()
        run.ended = time.time()
    for answer in answers:
        answer.read()
    return run


class _Answer:
    """One streamed completion: noted as it arrives, read when all have arrived.

    A client shares the cores with the server it measures, so while the clock runs it does next to nothing.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.begun = asyncio.Event()
        """Its headers are here, or will never be."""
        self._parts: list[tuple[float, bytes]] = []
        self._error: str | None = None

    async def receive(
        self, session: aiohttp.ClientSession, server: Server, model: str, advance: Advance | None
    ) -> None:
        item = self._timeline.item
        await asyncio.sleep(self._timeline.arrival - time.time())
        url, headers = f"{server.url}/v1/completions", server.headers(item.tenant)
        try:
            async with session.post(url, json=item.body(model), headers=headers) as response:
                self.begun.set()
                if not response.ok:
                    body = (await response.read()).decode(errors="replace")
                    self._error = f"HTTP {response.status}: {body[:200]}"
                    return
                async for part in response.content.iter_any():
                    self._parts.append((time.time(), part))
                    if advance:
                        advance(part.count(b"data: {"))
        except (aiohttp.ClientError, TimeoutError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()

    def read(self) -> None:
        """Fill the timeline in."""
        stream, timeline = CompletionStream(), self._timeline
        rest = b""
        for now, part in self._parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not (stream.done or stream.error):
                    stream.feed(line.decode(errors="replace"), now)
        if self._error is None:
            stream.end(timeline.item.output_tokens)
        timeline.token_times, timeline.text = stream.token_times, stream.text
        timeline.output = stream.token_ids
        timeline.error = self._error or stream.error
