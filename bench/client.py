"""A workload over HTTP: streamed completions from any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import httpx

from bench.report import Advance, BenchError
from bench.stream import CompletionStream
from bench.timeline import Timeline, Timelines
from bench.workload import FIRST_WORD, Item, Workload

CONNECT_TIMEOUT = 10.0
SILENCE_TIMEOUT = 300.0
"""Seconds without a byte after which a request counts as failed: a full queue is silent for long."""
PLUG_PROMPT = (FIRST_WORD,) * 8
PLUG_TOKENS, PLUG_TOKENS_EACH = 64, 1
"""Output tokens of a plug: at least so many, and so many for each request that is sent meanwhile."""


@dataclass(frozen=True)
class Endpoint:
    """Where to send, and as whom."""

    url: str
    api_key: str | None = None

    def headers(self, tenant: str = "default") -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"X-Tenant-Id": tenant, **key}

    def model(self) -> str:
        """The first model it serves. Raises BenchError when nobody answers."""
        try:
            answer = httpx.get(f"{self.url}/v1/models", headers=self.headers(), timeout=10)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise BenchError(f"{self.url}/v1/models answered {error.response.status_code}") from error
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise BenchError(f"no OpenAI-compatible server at {self.url}: {error}") from error


def drive(
    endpoint: Endpoint, workload: Workload, *, queued_at: int | None = None, advance: Advance | None = None
) -> Timelines:
    """Send each item when it is due and stream its answer; `advance` counts events, about one a token.

    A request that fails keeps the tokens it got and says why in its timeline.

    With `queued_at` it is a closed loop, in which all requests wait, in their order, when the clock starts.
    A plug keeps all so many slots of the server's one engine until every item is queued: one request for
    that many answers of one length, so that it takes the slots in one step and leaves them in one. The run
    starts, and every item arrives, when the plug has left; when items are due plays no part. Raises
    BenchError if the plug is refused, breaks off or leaves before all items are queued.
    """
    return asyncio.run(_drive(endpoint, workload, queued_at, advance))


async def _drive(
    endpoint: Endpoint, workload: Workload, queued_at: int | None, advance: Advance | None
) -> Timelines:
    model = endpoint.model()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE_TIMEOUT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        run = Timelines.of(workload if queued_at is None else workload.arriving(None), time.monotonic())
        answers = [_Answer(timeline, session, endpoint, model, advance) for timeline in run.requests]
        if queued_at is None:
            receiving = [asyncio.create_task(answer.receive()) for answer in answers]
        else:
            receiving = await _queue(answers, session, endpoint, model, queued_at)
            run.started = time.monotonic()
            for timeline in run.requests:
                timeline.arrival = run.started
        await asyncio.gather(*receiving)
    run.ended = time.monotonic()
    for answer in answers:
        answer.read()
    return run


async def _queue(
    answers: Sequence[_Answer], session: aiohttp.ClientSession, endpoint: Endpoint, model: str, slots: int
) -> list[asyncio.Task[None]]:
    """Let all answers be waited for behind a plug; returns when that has left."""
    tokens = max(PLUG_TOKENS, PLUG_TOKENS_EACH * len(answers))
    body = Item("plug", 0.0, PLUG_PROMPT, tokens).body(model) | {"prompt": [PLUG_PROMPT] * slots}
    url, headers = f"{endpoint.url}/v1/completions", endpoint.headers()
    receiving: list[asyncio.Task[None]] = []
    try:
        async with session.post(url, json=body, headers=headers) as plug:
            if not plug.ok:
                raise BenchError(f"the plug was refused: HTTP {plug.status}: {(await plug.text())[:200]}")
            leaving = asyncio.create_task(plug.read())
            for answer in answers:
                receiving.append(asyncio.create_task(answer.receive()))
                await answer.begun.wait()
            too_early = leaving.done()
            whole = (await leaving).endswith(b"data: [DONE]\n\n")
    except aiohttp.ClientError as error:
        raise BenchError(f"the plug broke off: {error}") from error
    if not whole:
        raise BenchError("the plug broke off: the server ended it with an error")
    if too_early:
        raise BenchError(f"the plug left after {tokens} tokens, before all {len(answers)} were queued")
    return receiving


@contextmanager
def kept_busy(ask: Callable[[int], object], threads: int) -> Iterator[None]:
    """Call `ask(number)` again and again, on a thread for each number, until the block ends.

    A question that fails over HTTP is asked again.
    """
    stopping = threading.Event()

    def go_on(number: int) -> None:
        while not stopping.is_set():
            with contextlib.suppress(httpx.HTTPError):
                ask(number)

    asking = [threading.Thread(target=go_on, args=(number,)) for number in range(threads)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in asking:
            thread.join()


class _Answer:
    """One streamed completion: noted as it arrives, read when all have arrived.

    A client shares the cores with the server it measures, so while the clock runs it does next to nothing.
    """

    def __init__(
        self,
        timeline: Timeline,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        model: str,
        advance: Advance | None,
    ) -> None:
        self.begun = asyncio.Event()
        """Its headers are here, or will never be."""
        self._timeline, self._session, self._advance = timeline, session, advance
        self._url, self._headers = f"{endpoint.url}/v1/completions", endpoint.headers(timeline.item.tenant)
        self._body = timeline.item.body(model)
        self._parts: list[tuple[float, bytes]] = []
        self._error: str | None = None

    async def receive(self) -> None:
        await asyncio.sleep(self._timeline.arrival - time.monotonic())
        try:
            async with self._session.post(self._url, json=self._body, headers=self._headers) as response:
                self.begun.set()
                if not response.ok:
                    body = (await response.read()).decode(errors="replace")
                    self._error = f"HTTP {response.status}: {body[:200]}"
                    return
                async for part in response.content.iter_any():
                    self._parts.append((time.monotonic(), part))
                    if self._advance:
                        self._advance(part.count(b"data: {"))
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
