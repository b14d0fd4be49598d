"""Spans on their way out: queued, bounded, counted, and never in anybody's way."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from engine_actor.messages import TelemetryConfig
from engine_actor.span_export import (
    SAMPLED,
    SCOPE,
    STARTUP_SPAN,
    JsonLinesExporter,
    SpanSink,
    open_sink,
    otlp_json,
)
from tests.otlp_receiver import Receiver, otlp_grpc_receiver, otlp_receiver

RESOURCE = Resource({"service.name": "slotserve"})


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)


def span(number: int = 1) -> ReadableSpan:
    context = SpanContext(0xABC0 + number, 0xDEF0 + number, False, SAMPLED)
    attributes: dict[str, AttributeValue] = {
        "text": "a",
        "count": 3,
        "share": 0.5,
        "yes": True,
        "ids": ("x", "y"),
    }
    return ReadableSpan(
        f"span {number}",
        context,
        SpanContext(context.trace_id, 7, True, SAMPLED),
        RESOURCE,
        attributes,
        [Event("chunk", {"tokens": 5}, timestamp=1_000_000_010)],
        [Link(SpanContext(5, 6, False, SAMPLED), {"why": "slowest"})],
        SpanKind.SERVER,
        status=Status(StatusCode.ERROR, "it broke"),
        start_time=1_000_000_000,
        end_time=2_000_000_000,
        instrumentation_scope=SCOPE,
    )


class StubbornExporter(SpanExporter):
    """Fails or blocks on command."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(10)
        if self.failing:
            raise ConnectionError("nobody there")
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_startup_span_goes_first_and_its_acknowledgement_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    exporter = InMemorySpanExporter()
    sink = SpanSink(exporter, "memory", RESOURCE, interval=0.01)
    sink.offer(2, lambda: [span(1), span(2)])
    assert sink.force_flush(5000)
    assert [item.name for item in exporter.get_finished_spans()] == [STARTUP_SPAN, "span 1", "span 2"]
    assert "traces: memory; it acknowledged the start-up span" in caplog.text
    assert (sink.exported, sink.dropped) == (3, 0)
    sink.shutdown()


def test_a_sink_holds_so_many_spans_and_counts_the_rest() -> None:
    exporter = StubbornExporter()
    exporter.gate.clear()
    sink = SpanSink(exporter, "slow", RESOURCE, capacity=3, interval=0.01)
    sink.offer(3, lambda: [span(number) for number in range(3)])
    assert sink.dropped == 0
    sink.offer(1, lambda: [span(3)])
    assert sink.dropped == 1
    exporter.gate.set()
    assert sink.force_flush(5000)
    assert exporter.taken == [STARTUP_SPAN, "span 0", "span 1", "span 2"]
    sink.shutdown()


def test_a_dead_collector_is_warned_about_once_and_again_when_it_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = StubbornExporter()
    exporter.failing = True
    sink = SpanSink(exporter, "grave", RESOURCE, interval=0.01, retry_after=0.02)
    for _ in range(5):
        sink.offer(1, lambda: [span()])
        time.sleep(0.03)
    exporter.failing = False
    deadline = time.monotonic() + 5
    while not exporter.taken and time.monotonic() < deadline:
        sink.offer(1, lambda: [span()])
        time.sleep(0.03)
    sink.shutdown()
    messages = [record.message for record in caplog.records if record.name == "engine_actor.span_export"]
    assert len(messages) == 2
    assert "grave does not take spans" in messages[0]
    assert "grave works again" in messages[1]
    assert sink.dropped > 0


def test_offering_to_a_blocked_exporter_costs_microseconds() -> None:
    exporter = StubbornExporter()
    exporter.gate.clear()
    sink = SpanSink(exporter, "stuck", RESOURCE)
    one = span()
    started = time.perf_counter()
    for _ in range(10_000):
        sink.offer(1, lambda: [one])
    seconds = time.perf_counter() - started
    exporter.gate.set()
    sink.shutdown()
    assert seconds / 10_000 < 100e-6


def test_our_json_is_protobufs_own() -> None:
    theirs = MessageToDict(encode_spans([span()]), use_integers_for_enums=True)
    [theirs_span] = theirs["resourceSpans"][0]["scopeSpans"][0]["spans"]
    [ours] = otlp_json([span()])["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert ours["traceId"] == f"{span().context.trace_id:032x}"
    # OTLP's JSON has ids in hexadecimal where protobuf's has base64, and flags are optional.
    for item in (ours, theirs_span, ours["links"][0], theirs_span["links"][0]):
        for key in ("traceId", "spanId", "parentSpanId", "flags"):
            item.pop(key, None)
    assert ours == theirs_span


def test_files_are_a_bounded_ring(tmp_path: Path) -> None:
    exporter = JsonLinesExporter(tmp_path, "engine-0", file_bytes=2000, files=3)
    for number in range(40):
        exporter.export([span(number)])
    files = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    assert len(files) == 3
    assert all(path.stat().st_size <= 2000 for path in files)
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    names = [line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for line in lines]
    assert names == [f"span {number}" for number in range(40 - len(names), 40)]


def test_the_directory_of_earlier_runs_is_bounded_too(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"old-{number}.jsonl").write_bytes(b"x" * 1000)
    JsonLinesExporter(tmp_path, "engine-0", file_bytes=1000, directory_bytes=5000).export([span()])
    assert sum(path.stat().st_size for path in tmp_path.glob("old-*")) == 4000


def test_a_file_that_another_process_prunes_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.jsonl").write_bytes(b"x" * 1000)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "gone.jsonl", self / "here.jsonl"])
    exporter = JsonLinesExporter(tmp_path, "engine-0", file_bytes=1000, directory_bytes=1500)
    assert exporter.export([span()]) is SpanExportResult.SUCCESS
    assert not (tmp_path / "here.jsonl").exists()


def test_a_directory_that_cannot_be_written_costs_spans_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "run"
    blocked.write_text("a file where the directory should be")
    sink = SpanSink(
        JsonLinesExporter(blocked, "engine-0"), "files", RESOURCE, interval=0.01, retry_after=0.02
    )
    wait_for(lambda: sink.dropped == 1)  # the start-up span
    assert "files does not take spans" in caplog.text
    blocked.unlink()
    sink.offer(1, lambda: [span()])
    wait_for(lambda: sink.exported == 1)
    sink.shutdown()


def opened(tmp_path: Path) -> SpanSink | None:
    return open_sink("engine-0", TelemetryConfig(run_dir=str(tmp_path), version="1.2"))


def send_one(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    assert sink is not None
    sink.offer(1, lambda: [span()])
    assert sink.force_flush(10_000)
    sink.shutdown()


def test_without_a_word_spans_go_to_files(tmp_path: Path) -> None:
    send_one(tmp_path)
    [file] = (tmp_path / "traces").iterdir()
    assert STARTUP_SPAN in file.read_text()


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_opentelemetrys_own_switches_turn_tracing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    assert opened(tmp_path) is None


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("protocol", "receive", "words"),
    [
        (None, otlp_receiver, "HTTP"),
        ("http/protobuf", otlp_receiver, "HTTP"),
        ("grpc", otlp_grpc_receiver, "gRPC"),
    ],
)
def test_a_collector_gets_the_spans_by_the_protocol_that_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str | None,
    receive: Callable[[], AbstractContextManager[Receiver]],
    words: str,
    named: bool,
) -> None:
    caplog.set_level(logging.INFO)
    with receive() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        if protocol is not None:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        if named:
            monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        send_one(tmp_path)
        assert [item.name for item in receiver.spans] == [STARTUP_SPAN, "span 1"]
        assert f"traces: OTLP/{words} to {receiver.url}; it acknowledged" in caplog.text
        startup = receiver.spans[0].resource
        assert (startup["service.name"], startup["service.version"]) == ("slotserve", "1.2")
        assert startup["service.instance.id"] == "engine-0"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=blue,service.name=chat"}, "chat"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=blue,service.name=chat", "OTEL_SERVICE_NAME": "llm"}, "llm"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=blue"}, "slotserve"),
    ],
)
def test_the_environment_names_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        send_one(tmp_path)
        # A span built by hand brings its resource along; the start-up span has the sink's.
        resource = receiver.spans[0].resource
        assert (resource["service.name"], resource["team"]) == (name, "blue")
        assert resource["service.instance.id"] == "engine-0"


def test_spans_can_go_to_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    # The exporter's default stream was chosen when it was imported.
    monkeypatch.setattr(
        ConsoleSpanExporter.__init__, "__defaults__", (None, sys.stdout, lambda s: s.to_json())
    )
    send_one(tmp_path)
    assert '"name": "span 1"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_TRACES_EXPORTER", "telegram"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeon")]
)
def test_an_exporter_that_is_not_there_is_warned_about(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    send_one(tmp_path)
    assert f"no exporter {value!r} is installed; spans go to files" in caplog.text
    assert list((tmp_path / "traces").iterdir())
