"""Every step visible through the real thing: `serve run`, 2 replicas x 2 engines, a collector, a browser."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from selenium.webdriver.common.by import By

from bench.chromium import chromium_missing, open_page
from tests.engine_actor.test_chrome_trace import check_nesting
from tests.otlp_receiver import ReceivedSpan, Receiver, otlp_receiver
from tests.page import problems
from tests.serving import Server, served

SECRET = "the walrus ate my marmalade"
REQUESTS = 16
SERVER_KIND = 2


@dataclass
class Watched:
    server: Server
    receiver: Receiver
    answers: list[dict[str, Any]]
    """The JSON answers, by the number in the caller's traceparent."""


def trace_id(number: int) -> str:
    return f"{0xA0000000 + number:032x}"


def caller_id(number: int) -> str:
    return f"{0xC0000000 + number:016x}"


async def ask_all(url: str) -> list[dict[str, Any]]:
    """Chat and completions, long prompts and short, all at once, each under a caller's span of its own."""

    async def ask(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
        headers = {
            "traceparent": f"00-{trace_id(number)}-{caller_id(number)}-01",
            "X-Tenant-Id": f"t{number % 3}",
        }
        text = f"{number} {SECRET} " * (1 + 12 * (number % 4))
        body: dict[str, Any]
        if number % 2:
            path, body = "/v1/completions", {"prompt": text}
        else:
            path, body = (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": text}], "n": 1 + number % 4 // 2},
            )
        body |= {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = await client.post(url + path, json=body, headers=headers, timeout=120)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))


def roots_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.kind == SERVER_KIND]


def has_roots(count: int, spans: list[ReceivedSpan]) -> bool:
    return len(roots_of(spans)) == count


def wait_until_all_replicas_answer(url: str, receiver: Receiver, replicas: int) -> None:
    """A replica that has started is not yet one the proxy knows. Asks what costs no token, and forgets it."""

    while len({root.resource["service.instance.id"] for root in roots_of(receiver.spans)}) < replicas:
        before = len(roots_of(receiver.spans))
        assert before < 100, "the proxy never came to know all replicas"
        for _ in range(4):
            answer = httpx.post(f"{url}/v1/completions", json={"model": "none", "prompt": "x"}, timeout=60)
            assert answer.status_code == 404
        receiver.wait_for(partial(has_roots, before + 4))
    receiver.spans[:] = [span for span in receiver.spans if span.kind != SERVER_KIND]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with otlp_receiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        settings = {"num_replicas": 2, "num_engines": 2, "max_num_seqs": 4, "max_len": 512}
        with served(settings, environment=environment) as server:
            wait_until_all_replicas_answer(server.url, receiver, 2)
            answers = asyncio.run(ask_all(server.url))
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "orphan", "max_tokens": 2},
                headers={"traceparent": "00-nonsense-01"},
                timeout=60,
            ).raise_for_status()
            roots = REQUESTS + 1
            receiver.wait_for(partial(has_roots, roots))
            sequences = 1 + sum(len(answer["choices"]) for answer in answers)
            receiver.wait_for(lambda spans: sum(span.name == "decode" for span in spans) == sequences)
            yield Watched(server, receiver, answers)


def tree(spans: list[ReceivedSpan], trace: str) -> tuple[ReceivedSpan, dict[str, list[ReceivedSpan]]]:
    """A trace's root of ours, and that root's children by name."""
    [root] = [span for span in spans if span.trace_id == trace and span.kind == SERVER_KIND]
    children: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        if span.trace_id == trace and span is not root:
            assert span.parent_id == root.span_id
            children.setdefault(span.name, []).append(span)
    return root, children


def test_one_trace_leads_from_the_caller_through_replica_and_engine(watched: Watched) -> None:
    spans = watched.receiver.spans
    steps = {span.span_id: span for span in spans if span.name == "engine.step"}
    replicas, engines = set(), set()
    for number, answer in enumerate(watched.answers):
        root, children = tree(spans, trace_id(number))
        choices = len(answer["choices"])
        assert root.parent_id == caller_id(number)
        assert set(children) == {"tokenize", "queue", "prefill", "decode", "detokenize"}
        assert {name: len(found) for name, found in children.items()} == {
            "tokenize": 1, "detokenize": 1, "queue": choices, "prefill": choices, "decode": choices
        }  # fmt: skip

        usage = answer["usage"]
        operation = "text_completion" if number % 2 else "chat"
        assert root.name == f"{operation} {answer['model']}"
        expected = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": answer["model"],
            "gen_ai.request.max_tokens": 12,
            "gen_ai.response.id": answer["id"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.response.finish_reasons": ["length"] * choices,
            "http.response.status_code": 200,
            "slotserve.tenant": f"t{number % 3}",
        }
        assert expected.items() <= root.attributes.items()
        to_first = root.attributes["gen_ai.response.time_to_first_chunk"]
        assert 0 < to_first < (root.end - root.start) / 1e9

        for found in children.values():
            for span in found:
                assert root.start <= span.start <= span.end <= root.end
        for prefill, decode in zip(children["prefill"], children["decode"], strict=True):
            assert prefill.end <= decode.end
            assert (
                sum(event[2]["slotserve.chunk.tokens"] for event in prefill.events)
                == (usage["prompt_tokens"])
            )
            assert decode.attributes["slotserve.decode.tokens"] == 11
            for span in (prefill, decode):
                roles = [role for _, _, facts in span.links for role in facts["slotserve.step.role"]]
                assert sorted(roles) == ["first", "last", "slowest"]
                for _, step_id, facts in span.links:
                    step = steps[step_id]
                    assert step.attributes["slotserve.step.number"] == facts["slotserve.step.number"]
                    assert (
                        span.attributes["slotserve.request.id"]
                        in step.attributes["slotserve.step.request_ids"]
                    )
                    assert step.resource["service.instance.id"] == span.resource["service.instance.id"]
            engines.add(decode.resource["service.instance.id"])
        replicas.add(root.resource["service.instance.id"])
        assert {span.resource["service.name"] for found in children.values() for span in found} == {
            "slotserve"
        }
    assert engines == {"engine-0", "engine-1"}
    assert len(replicas) == 2


def test_a_malformed_traceparent_starts_a_trace_of_its_own(watched: Watched) -> None:
    spans = watched.receiver.spans
    ours = {trace_id(number) for number in range(REQUESTS)}
    [root] = [span for span in spans if span.kind == SERVER_KIND and span.trace_id not in ours]
    assert root.parent_id == ""
    _, children = tree(spans, root.trace_id)
    assert set(children) == {"tokenize", "queue", "prefill", "decode", "detokenize"}


def test_every_process_proved_its_exporter_and_said_where_traces_go(watched: Watched) -> None:
    started = [span for span in watched.receiver.spans if span.name == "slotserve.startup"]
    assert len({span.resource["service.instance.id"] for span in started}) == len(started) == 4
    said = re.findall(r"traces: OTLP/HTTP to (\S+); it acknowledged the start-up span", watched.server.log)
    assert set(said) == {watched.receiver.url}


def test_no_prompt_text_leaves(watched: Watched) -> None:
    for span in watched.receiver.spans:
        assert "walrus" not in json.dumps([span.attributes, span.events, span.links])


def test_steps_of_both_engines_have_their_phases(watched: Watched) -> None:
    spans = watched.receiver.spans
    steps = [span for span in spans if span.name == "engine.step"]
    assert {step.attributes["slotserve.engine"] for step in steps} == {"engine-0", "engine-1"}
    for step in steps:
        phases = [s.name for s in spans if s.parent_id == step.span_id and s.trace_id == step.trace_id]
        assert phases == ["engine.admit", "engine.decode", "engine.sample", "engine.retire"]


def test_any_replica_shows_the_figures_of_all_engines(watched: Watched) -> None:
    for _ in range(4):
        with httpx.Client() as client:
            text = client.get(f"{watched.server.url}/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        ended = [s for s in families["slotserve_requests"].samples if s.labels["tenant"] != "default"]
        assert sum(s.value for s in ended) == sum(len(answer["choices"]) for answer in watched.answers)
        assert {s.labels["engine"] for s in families["slotserve_steps"].samples} == {"engine-0", "engine-1"}
        [info, _] = families["slotserve_engine_info"].samples
        assert (info.labels["mode"], info.labels["policy"]) == ("chunked", "fcfs")


def test_rays_own_metrics_show_the_same_figures(watched: Watched) -> None:
    [port] = watched.server.directory.glob("ray/session_2*/metrics_export_port_*")
    expected = sum(answer["usage"]["completion_tokens"] for answer in watched.answers) + 2

    def mirrored() -> float:
        lines = httpx.get(
            f"http://127.0.0.1:{port.read_text().strip()}/metrics", timeout=10
        ).text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("ray_slotserve_output_tokens_total{")
        )

    # Ray's processes report every ten seconds.
    deadline = time.monotonic() + 40
    while mirrored() < expected and time.monotonic() < deadline:
        time.sleep(1)
    assert mirrored() == expected


def test_the_trace_shows_every_request_on_its_engine(watched: Watched) -> None:
    trace = httpx.get(f"{watched.server.url}/trace?seconds=600", timeout=30).json()
    check_nesting(trace["traceEvents"])
    bars = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {answer["id"] for answer in watched.answers if len(answer["choices"]) == 1} <= bars
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}


@pytest.mark.skipif(bool(chromium_missing()), reason=chromium_missing() or "-")
def test_a_prompt_sent_from_the_page_travels_before_ones_eyes(watched: Watched) -> None:
    with open_page(watched.server.url) as page:
        page.wait(lambda: "4 slots" in page.text("facts"), "the header")
        page.driver.find_element(By.ID, "send").click()
        page.wait(lambda: len(page.text("answer")) > 10, "an answer", 30)
        page.wait(lambda: "now in decode" in page.text("request"), "the request on its way", 30)
        page.wait(lambda: "finished" in page.text("request"), "the request's end", 30)
        assert page.painted() > 500
        page.screenshot("served-prompt")
        assert problems(page) == []
