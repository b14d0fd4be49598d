"""The observing routes: bounds, keys, and that nobody looking costs nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from app import live, observe
from app.api_error import ApiError
from app.live import LAG, LiveFeed
from app.observe import MAX_TRACES, MAX_WATCHERS, Observatory
from engine_actor.history import HISTORY_SECONDS
from tests.engine_actor.test_chrome_trace import check_nesting
from tests.observed import ObservedServer, RunningEngine, observed_server, offer_load


@pytest.fixture(scope="module")
def server() -> Iterator[ObservedServer]:
    with observed_server(
        {f"engine-{index}": RunningEngine(f"engine-{index}") for index in range(2)}
    ) as server:
        for running in server.engines.values():
            offer_load(running, 12)
        wait_until(lambda: not any(running.engine.has_work() for running in server.engines.values()))
        yield server


def wait_until(done: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_the_trace_shows_all_engines_and_parses(server: ObservedServer) -> None:
    response = httpx.get(f"{server.url}/trace?seconds={HISTORY_SECONDS}")
    assert response.status_code == 200
    trace = response.json()
    check_nesting(trace["traceEvents"])
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert trace["otherData"]["steps"] == sum(running.engine.steps for running in server.engines.values())
    assert "attachment" in response.headers["content-disposition"]


@pytest.mark.parametrize("seconds", ["600.1", "1e9", "inf", "nan", "0", "-5", "soon", ""])
def test_absurd_seconds_are_refused_with_the_limit(server: ObservedServer, seconds: str) -> None:
    response = httpx.get(f"{server.url}/trace", params={"seconds": seconds})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "seconds"
    assert str(HISTORY_SECONDS) in error["message"]


def test_metrics_of_all_engines_are_one_page(server: ObservedServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    steps = {sample.labels["engine"]: sample.value for sample in families["slotserve_steps"].samples}
    assert steps == {name: running.engine.steps for name, running in server.engines.items()}
    ended = [s for s in families["slotserve_requests"].samples if s.name == "slotserve_requests_total"]
    assert sum(sample.value for sample in ended) == 24


def test_a_page_gets_what_runs_here_then_history_then_news(server: ObservedServer) -> None:
    with httpx.stream("GET", f"{server.url}/live", timeout=10) as response:
        lines = response.iter_lines()
        hello = json.loads(next(lines))
        assert {info["slots"] for info in hello["engines"]} == {16}
        past = [json.loads(next(lines)) for _ in range(2)]
        assert {line["engine"] for line in past} == set(server.engines)
        for line in past:
            numbers = [step["number"] for step in line["steps"]]
            assert numbers == list(range(server.engines[line["engine"]].engine.steps))
        newest = past[0]["steps"][-1]["number"]
        running = server.engines[past[0]["engine"]]
        running.submit("chatcmpl-news", 5, 3)
        seen: set[str] = set()
        while "chatcmpl-news" not in seen:
            line = json.loads(next(lines))
            for step in line["steps"]:
                if line["engine"] == running.view.name and step["number"] > newest:
                    seen |= {share[0] for share in step["shares"]}


def test_nobody_looking_means_nobody_asked(server: ObservedServer) -> None:
    views = [running.view for running in server.engines.values()]
    with httpx.stream("GET", f"{server.url}/live", timeout=10) as response:
        lines = response.iter_lines()
        next(lines)
        asked = [view.asked for view in views]
        wait_until(lambda: all(view.asked > before for view, before in zip(views, asked, strict=True)))
    time.sleep(0.5)
    asked = [view.asked for view in views]
    time.sleep(0.5)
    assert [view.asked for view in views] == asked


def test_so_many_pages_may_be_open(server: ObservedServer) -> None:
    with ExitStack() as stack:
        limits = httpx.Limits(max_connections=MAX_WATCHERS + 2)
        client = stack.enter_context(httpx.Client(base_url=server.url, limits=limits, timeout=10))
        pages = []
        for _ in range(MAX_WATCHERS):
            response = stack.enter_context(client.stream("GET", "/live"))
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            pages.append((response, lines))
        refused = client.get("/live")
        assert refused.status_code == 503
        assert str(MAX_WATCHERS) in refused.json()["error"]["message"]
        pages[0][0].close()
        wait_until(lambda: _status(client) == 200)


def _status(client: httpx.Client) -> int:
    with client.stream("GET", "/live") as response:
        return response.status_code


def test_so_many_traces_are_built_at_once() -> None:
    async def flood() -> list[object]:
        gate = asyncio.Event()

        class SlowView:
            async def news(self, since: int) -> tuple[int, bytes]:
                return -1, b""

            async def history(self, seconds: float) -> list[bytes]:
                await gate.wait()
                return []

            async def figures(self) -> list[Metric]:
                return []

        observatory = Observatory(
            lambda: {"engine-0": SlowView()}, dict, lambda headers: None, AsyncMock(return_value=[])
        )

        class Query:
            method = "GET"
            headers: Mapping[str, str] = {}
            query_params: Mapping[str, str] = {}

        built = [asyncio.create_task(observatory.trace(Query())) for _ in range(MAX_TRACES)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        one_too_many = asyncio.create_task(observatory.trace(Query()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        gate.set()
        return list(await asyncio.gather(*built, one_too_many, return_exceptions=True))

    *built, refused = asyncio.run(flood())
    assert [getattr(response, "status_code", response) for response in built] == [200] * MAX_TRACES
    assert isinstance(refused, ApiError)
    assert refused.status == 429
    assert str(MAX_TRACES) in refused.message


def test_a_page_that_does_not_read_is_dropped() -> None:
    async def lag() -> tuple[int, list[bytes]]:
        feed = LiveFeed(dict, dict, max_watchers=1)
        watcher = feed.enter()
        for index in range(LAG + 1):
            feed._tell(watcher, b"%d" % index)
        feed.enter()  # Its place is free again.
        received = [line async for line in feed.read(watcher)]
        return watcher.lines.qsize(), received

    left, received = asyncio.run(lag())
    assert left == 0
    assert received[1:] == [b"%d" % index for index in range(1, LAG)]


def test_an_engine_that_comes_up_later_is_shown_on_open_pages(server: ObservedServer) -> None:
    up = {"engine-0": server.engines["engine-0"].view}

    async def look() -> tuple[set[str], set[asyncio.Task[Any]]]:
        feed = LiveFeed(lambda: up, lambda: {"engines": list(up)}, max_watchers=1)
        watcher = feed.enter()
        up["engine-1"] = server.engines["engine-1"].view
        shown: set[str] = set()
        async with asyncio.timeout(10):
            while (line := json.loads(await watcher.lines.get() or b"")).get("engine") != "engine-1":
                shown.update(line.get("engines", []))
        feed.leave(watcher)
        await asyncio.sleep(0)
        return shown, asyncio.all_tasks() - {asyncio.current_task()}

    shown, left = asyncio.run(look())
    assert shown == {"engine-0", "engine-1"}, "the page was told who it is before it was shown"
    assert not left


def test_data_is_behind_the_key_and_the_page_is_not() -> None:
    def authorize(headers: Mapping[str, str]) -> None:
        if headers.get("authorization") != "Bearer secret":
            raise ApiError(401, "Wrong key.")

    with observed_server({"engine-0": RunningEngine("engine-0")}, authorize) as server:
        for path in ("/live", "/trace", "/metrics"):
            assert httpx.get(server.url + path).status_code == 401
        for path in ("/trace", "/metrics"):
            assert httpx.get(server.url + path, headers={"Authorization": "Bearer secret"}).status_code == 200
        for path in ("/", "/web/main.js", "/web/vendor/uPlot.esm.js"):
            response = httpx.get(server.url + path)
            assert response.status_code == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]
        outside = httpx.get(f"{server.url}/web/%2e%2e/observe.py")
        assert outside.request.url.raw_path == b"/web/%2e%2e/observe.py", "the client has tidied it up"
        assert outside.status_code == 404


def test_a_dead_engine_leaves_the_others_visible(server: ObservedServer) -> None:
    class DeadView:
        async def news(self, since: int) -> tuple[int, bytes]:
            raise ConnectionError

        async def history(self, seconds: float) -> list[bytes]:
            raise ConnectionError

        async def figures(self) -> list[Metric]:
            raise ConnectionError

    alive = server.engines["engine-0"].view
    observatory = Observatory(
        lambda: {"engine-0": alive, "engine-1": DeadView()},
        dict,
        lambda headers: None,
        AsyncMock(return_value=[]),
    )

    class Query:
        method = "GET"
        headers: Mapping[str, str] = {}
        query_params: Mapping[str, str] = {}

    async def ask() -> tuple[bytes, bytes]:
        metrics = await observatory.metrics(Query())  # type: ignore[arg-type]
        trace = await observatory.trace(Query())  # type: ignore[arg-type]
        return bytes(metrics.body), bytes(trace.body)

    metrics, trace = asyncio.run(ask())
    assert b'slotserve_steps_total{engine="engine-0"}' in metrics
    assert {event["pid"] for event in json.loads(trace)["traceEvents"]} == {0}


def test_a_frozen_engine_leaves_the_others_visible(
    server: ObservedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(observe, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(observe, "TRACE_SECONDS", 0.1)

    class FrozenView:
        async def news(self, since: int) -> tuple[int, bytes]:
            await asyncio.Event().wait()
            raise AssertionError

        async def history(self, seconds: float) -> list[bytes]:
            await asyncio.Event().wait()
            raise AssertionError

        async def figures(self) -> list[Metric]:
            await asyncio.Event().wait()
            raise AssertionError

    views: dict[str, live.EngineView] = {
        "engine-0": FrozenView(),
        "engine-1": server.engines["engine-1"].view,
    }
    observatory = Observatory(lambda: views, dict, lambda headers: None, AsyncMock(return_value=[]))

    class Query:
        method = "GET"
        headers: Mapping[str, str] = {}
        query_params: Mapping[str, str] = {}

    async def ask() -> tuple[bytes, bytes, bytes]:
        metrics = await observatory.metrics(Query())  # type: ignore[arg-type]
        trace = await observatory.trace(Query())  # type: ignore[arg-type]
        feed = LiveFeed(lambda: views, dict, max_watchers=1)
        watcher = feed.enter()
        lines = feed.read(watcher)
        await anext(lines)
        backlog = await anext(lines)
        feed.leave(watcher)
        return bytes(metrics.body), bytes(trace.body), backlog

    metrics, trace, backlog = asyncio.run(asyncio.wait_for(ask(), 10))
    assert b'slotserve_steps_total{engine="engine-1"}' in metrics
    assert {event["pid"] for event in json.loads(trace)["traceEvents"]} == {1}
    assert json.loads(backlog)["engine"] == "engine-1"


def test_a_page_goes_on_when_an_engine_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.01)
    asked: list[int] = []

    class RestartedView:
        """Alive at step 7, then gone, then back from step 0 on."""

        async def news(self, since: int) -> tuple[int, bytes]:
            asked.append(since)
            if len(asked) == 2:
                raise ConnectionError
            return (7, b"before\n") if len(asked) == 1 else (len(asked), b"after\n")

        async def history(self, seconds: float) -> list[bytes]:
            return []

        async def figures(self) -> list[Metric]:
            return []

    async def watch() -> list[bytes]:
        feed = LiveFeed(lambda: {"engine-0": RestartedView()}, dict, max_watchers=1)
        watcher = feed.enter()
        lines = feed.read(watcher)
        received = [await anext(lines) for _ in range(4)]
        feed.leave(watcher)
        return received

    received = asyncio.run(asyncio.wait_for(watch(), 10))
    assert received[2:] == [b"before\n", b"after\n"]
    assert asked[:3] == [-1, 7, -1]
