"""The HTTP side: streams are timed token by token, and a failing one says why and keeps its part."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from bench import client, workload
from bench.client import Endpoint
from bench.report import BenchError
from bench.stream import CompletionStream
from tests.bench.fake_server import Behaviour, FakeServer

NOBODY = Endpoint("http://127.0.0.1:9")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer().running() as server:
        yield server


def test_every_token_is_timed_from_the_items_arrival(fake: FakeServer) -> None:
    load = workload.preset("smoke").arriving(50.0)
    run = client.drive(Endpoint(fake.url), load)
    assert run.errors == []
    assert [len(t.token_times) for t in run.requests] == [i.output_tokens for i in load.items]
    assert [t.output for t in run.requests] == [list(range(i.output_tokens)) for i in load.items]
    for timeline in run.requests:
        assert timeline.arrival == run.started + timeline.item.arrival
        assert timeline.token_times == sorted(timeline.token_times)
        assert min(timeline.itls) < 0.1
    figures = run.summary()
    assert figures["completed"] == 8
    assert 0 < figures["ttft_p50"] <= figures["ttft_p95"] < figures["e2e_max"]


def test_a_closed_loop_is_queued_in_order_behind_a_plug_and_starts_when_that_has_left() -> None:
    load = workload.preset("smoke").arriving(50.0)
    with FakeServer(delay=0.01).running() as fake:
        fake.behaviour = "first one late"
        sent = time.monotonic()
        run = client.drive(Endpoint(fake.url), load, queued_at=3)
    assert run.errors == []
    (_, plug), *bodies = fake.seen
    assert plug["prompt"] == [list(client.PLUG_PROMPT)] * 3
    assert [body["prompt"] for _, body in bodies] == [list(item.prompt) for item in load.items]
    assert run.started > sent + client.PLUG_TOKENS * 0.01
    assert {timeline.arrival for timeline in run.requests} == {run.started}
    assert run.ended >= run.started


@pytest.mark.parametrize(
    ("behaviour", "delay", "complaint"),
    [
        ("first one late", 0.0, "the plug left after 64 tokens, before all 8 were queued"),
        ("refuses", 0.001, "the plug was refused: HTTP 429: .*the queue is full"),
        ("breaks off", 0.01, "the plug broke off"),
        ("error event", 0.01, "the plug broke off"),
    ],
)
def test_a_plug_that_does_not_hold_is_one_line(behaviour: Behaviour, delay: float, complaint: str) -> None:
    server = FakeServer(delay=delay)
    server.behaviour = behaviour
    with server.running(), pytest.raises(BenchError, match=complaint):
        client.drive(Endpoint(server.url), workload.preset("smoke"), queued_at=3)


def test_what_keeps_a_server_busy_goes_on_after_a_failure_and_ends() -> None:
    asked: Counter[int] = Counter()

    def ask(number: int) -> None:
        asked[number] += 1
        time.sleep(0.001)
        raise httpx.ReadTimeout("slow")

    with client.kept_busy(ask, 2):
        time.sleep(0.1)
    total = asked.total()
    assert min(asked[0], asked[1]) > 1
    time.sleep(0.02)
    assert asked.total() == total


def test_tenant_key_and_forced_length_are_sent(fake: FakeServer) -> None:
    load = workload.preset("smoke").among({"a": 1.0}, {-1: 1.0})
    client.drive(Endpoint(fake.url, api_key="k"), load)
    headers, body = fake.seen[0]
    assert (headers["X-Tenant-Id"], headers["Authorization"]) == ("a", "Bearer k")
    assert (body["priority"], body["ignore_eos"], body["model"]) == (-1, True, "toy")


@pytest.mark.parametrize(
    ("behaviour", "complaint", "kept"),
    [
        ("breaks off", "ClientPayloadError", 0.5),
        ("error event", "the engine failed", 0.5),
        ("refuses", "HTTP 429: .*the queue is full", 0),
    ],
)
def test_a_failing_stream_says_why_and_keeps_its_tokens(
    fake: FakeServer, behaviour: Behaviour, complaint: str, kept: float
) -> None:
    fake.behaviour = behaviour
    run = client.drive(Endpoint(fake.url), workload.preset("smoke"))
    assert len(run.errors) == len(run.requests)
    for timeline in run.requests:
        assert len(timeline.token_times) == int(kept * timeline.item.output_tokens)
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(run.errors[0])
    assert run.summary()["completed"] == 0
    assert run.summary()["ttft_p50"] is None


def test_an_absent_server_is_one_line() -> None:
    with pytest.raises(BenchError, match=r"no OpenAI-compatible server at http://127\.0\.0\.1:9: "):
        client.drive(NOBODY, workload.preset("smoke"))


def event(text: str, completion_tokens: int | None = None) -> str:
    usage = {} if completion_tokens is None else {"usage": {"completion_tokens": completion_tokens}}
    return "data: " + json.dumps({"choices": [{"text": text}], **usage})


def test_usage_decides_how_many_tokens_a_chunk_holds() -> None:
    stream = CompletionStream()
    stream.feed(event("", 1), 1.0)
    stream.feed(event("é", 2), 2.0)
    stream.feed(event(" two", 4), 3.0)
    stream.feed("data: [DONE]", 4.0)
    stream.end(4)
    assert stream.token_times == [1.0, 2.0, 3.0, 3.0]
    assert (stream.text, stream.error) == ("é two", None)


def test_without_usage_a_chunk_with_text_is_a_token() -> None:
    stream = CompletionStream()
    for line in (event("a"), "", ": ping", event("b"), event(""), "data: [DONE]"):
        stream.feed(line, 1.0)
    stream.end(2)
    assert (len(stream.token_times), stream.error) == (2, None)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([event("a")], "broke off after 1 of 2 tokens"),
        ([event("a"), "data: [DONE]"], "1 tokens instead of 2"),
        (["data: {"], "not JSON"),
        (['data: {"error": "boom"}'], "boom"),
    ],
)
def test_what_is_wrong_with_a_stream_is_said(lines: list[str], complaint: str) -> None:
    stream = CompletionStream()
    for line in lines:
        stream.feed(line, 1.0)
    stream.end(2)
    assert stream.error is not None
    assert complaint in stream.error
