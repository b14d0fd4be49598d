"""The HTTP side of a trace, over a toy engine in this process: refusals, hang-ups, prompts, sampling."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from opentelemetry import propagate
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.config import Settings
from app.engine_client import EngineClient
from app.ingress import create_app
from app.refusals import Refusals
from app.service import Service
from app.tenants import Tenants
from app.tokenizer import Tokenizer
from engine_actor.span_export import STARTUP_SPAN, SpanSink
from tests.app.engines import POISON, LocalDirectory, build_toy

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_of(
    work: Callable[[httpx.AsyncClient], Awaitable[None]],
    tokenizer: Tokenizer,
    *,
    prefix: str = "",
    **settings: Any,
) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    sink = SpanSink(exporter, "memory", Resource({}), interval=0.01)

    async def main() -> None:
        directory = LocalDirectory(build_toy(seconds=0.01, max_len=128))
        client = EngineClient("replica", 1, directory, directory.max_waiting)
        await client.start()
        service = Service(
            Settings(model_name="toy", **settings), tokenizer, client, Tenants({}, 9), Refusals(directory)
        )
        app = create_app(service, sink=sink)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix)
        try:
            async with httpx.AsyncClient(transport=transport, base_url=f"http://toy{prefix}") as http:
                await work(http)
        finally:
            await client.stop()
            directory.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
    sink.shutdown()
    return [span for span in exporter.get_finished_spans() if span.name != STARTUP_SPAN]


def root_of(spans: list[ReadableSpan]) -> tuple[ReadableSpan, dict[str, Any]]:
    [root] = [span for span in spans if span.kind is SpanKind.SERVER]
    return root, dict(root.attributes or {})


async def complete(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    headers = body.pop("headers", {})
    return await http.post(
        "/v1/completions", json={"max_tokens": 3, "ignore_eos": True} | body, headers=headers
    )


def test_a_refused_request_is_a_root_span_with_its_status(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await complete(http, prompt="x", n=-1)).status_code == 400

    root, facts = root_of(spans_of(work, tokenizer))
    assert root.name == "text_completion"
    assert facts["http.response.status_code"] == 400
    assert "error.type" not in facts
    assert root.status.status_code is StatusCode.UNSET


def test_a_clients_mistake_is_no_error_of_any_span(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        # It is found while tokenizing.
        assert (await complete(http, prompt=[10**9])).status_code == 400

    spans = spans_of(work, tokenizer)
    assert {span.name for span in spans} == {"tokenize", "text_completion"}
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert [span.events for span in spans] == [(), ()]


@pytest.mark.parametrize(("stream", "status", "error"), [(False, 500, "500"), (True, 200, "engine_error")])
def test_an_engine_that_fails_makes_the_root_an_error(
    tokenizer: Tokenizer, stream: bool, status: int, error: str
) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await complete(http, prompt=[POISON, 1], stream=stream)).status_code == status

    root, facts = root_of(spans_of(work, tokenizer))
    assert facts["http.response.status_code"] == status
    assert facts["error.type"] == error
    assert root.status.status_code is StatusCode.ERROR


def test_a_bug_of_ours_is_not_taken_for_a_client_that_hung_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(EngineClient, "generate", bug)

    async def work(http: httpx.AsyncClient) -> None:
        assert (await complete(http, prompt=[1])).status_code == 500

    root, facts = root_of(spans_of(work, tokenizer))
    assert facts["http.response.status_code"] == 500
    assert facts["error.type"] == "RuntimeError"
    assert root.status.status_code is StatusCode.ERROR


def test_a_route_prefix_changes_nothing_but_the_address(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await complete(http, prompt=[1])).status_code == 200
        for path in ("/", "/health", "/v1/models", "/web/main.js"):
            assert (await http.get(path)).status_code == 200
        # The page's own addresses are relative to the slash.
        bare = await http.get("http://toy/llm")
        assert bare.headers["location"] == "http://toy/llm/"

    root, facts = root_of(spans_of(work, tokenizer, prefix="/llm"))
    assert facts["http.route"] == "/v1/completions"
    assert root.name == "text_completion toy"


def test_only_what_was_asked_for_is_in_the_root(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        await complete(http, prompt=[1])

    async def narrowed(http: httpx.AsyncClient) -> None:
        await complete(http, prompt=[1], top_k=7)

    assert "gen_ai.request.top_k" not in root_of(spans_of(work, tokenizer))[1]
    assert root_of(spans_of(narrowed, tokenizer))[1]["gen_ai.request.top_k"] == 7


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_told_apart(tokenizer: Tokenizer, stream: bool) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(complete(http, prompt=[1], max_tokens=100, stream=stream))
        await asyncio.sleep(0.3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    _, facts = root_of(spans_of(work, tokenizer))
    assert facts["error.type"] == "client_disconnected"


@pytest.mark.parametrize("revealed", [False, True])
def test_prompts_are_in_traces_only_when_switched_on(tokenizer: Tokenizer, revealed: bool) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await complete(http, prompt=[65, 66])).status_code == 200

    _, facts = root_of(spans_of(work, tokenizer, trace_prompts=revealed))
    assert ("gen_ai.input.messages" in facts) == revealed
    assert (json.dumps(tokenizer.decode([65, 66])) in str(facts)) == revealed


def test_a_caller_that_does_not_sample_leaves_no_spans(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for flags in ("00", "01"):
            await complete(http, prompt=[1], headers={"traceparent": f"00-{TRACE}-{CALLER}-{flags}"})

    root, _ = root_of(spans_of(work, tokenizer))
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == CALLER


@pytest.mark.parametrize(
    ("sampler", "argument", "traced"),
    [("always_off", "", 0), ("traceidratio", "0.0", 0), ("parentbased_traceidratio", "1.0", 3)],
)
def test_the_environments_sampler_decides_about_requests_without_a_caller(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, traced: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)

    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await complete(http, prompt=[1])).status_code == 200

    assert sum(span.kind is SpanKind.SERVER for span in spans_of(work, tokenizer)) == traced


@pytest.mark.parametrize(("propagators", "continued"), [("none", False), ("tracecontext", True)])
def test_the_environments_propagators_read_the_callers_headers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, propagators: str, continued: bool
) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        assert (await complete(http, prompt=[1], headers=headers)).status_code == 200

    try:
        with monkeypatch.context() as environment:
            environment.setenv("OTEL_PROPAGATORS", propagators)
            importlib.reload(propagate)  # Where the variable is read.
        root, _ = root_of(spans_of(work, tokenizer))
    finally:
        importlib.reload(propagate)
    assert root.context is not None
    assert (f"{root.context.trace_id:032x}" == TRACE) == continued


def test_other_routes_are_not_traced(tokenizer: Tokenizer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/health")).status_code == 200

    assert spans_of(work, tokenizer) == []
