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
LONGEST_LINE = 1 << 20
"""Bytes of one server-sent event."""


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


def drive(server: Server, workload: Workload, *, advance: Advance | None = None) -> Timelines:
    """Send each item when it is due and stream its answer; `advance` counts output tokens.

    A request that fails keeps the tokens it got and says why in its timeline.
    """
    return asyncio.run(_drive(server, workload, advance))


async def _drive(server: Server, workload: Workload, advance: Advance | None) -> Timelines:
    model = server.model()
    # Not httpx: on a machine that also runs the server, each token's work here is taken from it.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE
    ) as session:
        run = Timelines.of(workload, time.time())
        async with asyncio.TaskGroup() as group:
            for timeline in run.requests:
                group.create_task(_complete(session, server, model, timeline, advance))
        run.ended = time.time()
    return run


async def _complete(
    session: aiohttp.ClientSession, server: Server, model: str, timeline: Timeline, advance: Advance | None
) -> None:
    item, stream = timeline.item, CompletionStream()
    timeline.token_times = stream.token_times
    await asyncio.sleep(timeline.arrival - time.time())
    url, headers = f"{server.url}/v1/completions", server.headers(item.tenant)
    try:
        async with session.post(url, json=item.body(model), headers=headers) as response:
            if response.ok:
                async for line in response.content:
                    before = len(stream.token_times)
                    stream.feed(line.decode(errors="replace"), time.time())
                    if advance:
                        advance(len(stream.token_times) - before)
                    if stream.done or stream.error:
                        break
                stream.end(item.output_tokens)
            else:
                body = (await response.read()).decode(errors="replace")
                stream.error = f"HTTP {response.status}: {body[:200]}"
    # A line beyond LONGEST_LINE is a ValueError.
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    timeline.text, timeline.output, timeline.error = stream.text, stream.token_ids, stream.error
