"""Where spans go: to an OpenTelemetry exporter, or to a bounded ring of files when none is named.

The queue is ours since the SDK's BatchSpanProcessor takes finished spans one by one (here a step's are built
on export), ignores the time limit of a flush and does not tell how many spans it has dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from engine_actor.messages import TelemetryConfig

log = logging.getLogger(__name__)

SCOPE = InstrumentationScope("slotserve")
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
STARTUP_SPAN = "slotserve.startup"

PROTOCOLS = {
    "http/protobuf": ("otlp_proto_http", "OTLP/HTTP", "http://localhost:4318"),
    "grpc": ("otlp_proto_grpc", "OTLP/gRPC", "http://localhost:4317"),
}
"""OTEL_EXPORTER_OTLP_PROTOCOL: the exporter's entry point, its name for people, where it leads by default."""

QUEUED_SPANS = 4096
"""Spans a sink holds at most: some 20 seconds of a busy engine."""
BATCH_SPANS = 512
EXPORT_SECONDS = 1.0
"""Between exports."""
RETRY_SECONDS = 15.0
"""How long to leave a collector alone that failed; spans queue meanwhile, and drop when the queue is full."""
SHUTDOWN_SECONDS = 5.0

Build = Callable[[], Sequence[ReadableSpan]]


def service_resource(instance: str, version: str) -> Resource:
    """Who emits. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before our own name and version."""
    named = OTELResourceDetector().detect().attributes
    ours = {SERVICE_NAME: "slotserve", SERVICE_VERSION: version}
    return Resource.create({**ours, **named, SERVICE_INSTANCE_ID: instance})


def open_exporter(run_dir: Path, instance: str) -> tuple[SpanExporter, str] | None:
    """The exporter that OpenTelemetry's variables ask for, and where it leads, in words; None: no spans.

    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/: OTEL_SDK_DISABLED,
    OTEL_TRACES_EXPORTER (none, console, otlp or any that is installed), OTEL_EXPORTER_OTLP_PROTOCOL; the
    exporters read the rest (endpoint, headers, certificates, timeout). With neither exporter nor endpoint
    named, spans go to files.
    """
    exporter = os.getenv("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none" or os.getenv("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    entry, where = exporter, exporter
    endpoint = _otlp("ENDPOINT")
    if exporter == "otlp" or (endpoint and not exporter):
        protocol = _otlp("PROTOCOL") or "http/protobuf"
        entry, words, usual = PROTOCOLS.get(protocol, (protocol, protocol, ""))
        where = f"{words} to {endpoint or usual}"
    for found in entry_points(group="opentelemetry_traces_exporter", name=entry):
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # The sink warns instead.
        return found.load()(), where
    if entry:
        log.warning("traces: no exporter %r is installed; spans go to files", entry)
    directory = run_dir / "traces"
    return JsonLinesExporter(directory, instance), f"OTLP JSON lines in {directory}"


def _otlp(name: str) -> str:
    return os.getenv(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.getenv(f"OTEL_EXPORTER_OTLP_{name}") or ""


def open_sink(instance: str, config: TelemetryConfig) -> SpanSink | None:
    """The sink of one process; None where tracing is off."""
    opened = open_exporter(Path(config.run_dir), instance) if config.tracing else None
    return opened and SpanSink(*opened, service_resource(instance, config.version))


class SpanSink(SpanProcessor):
    """A bounded queue and the thread that empties it into an exporter. Never blocks who fills it.

    The first span out says that the service started: whether the exporter took it is logged, so that
    a silent exporter does not go unnoticed.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        destination: str,
        resource: Resource,
        *,
        capacity: int = QUEUED_SPANS,
        interval: float = EXPORT_SECONDS,
        retry_after: float = RETRY_SECONDS,
    ) -> None:
        self.resource = resource
        self.exported = 0
        self.dropped = 0
        self._exporter = exporter
        self._destination = destination
        self._capacity = capacity
        self._interval = interval
        self._retry_after = retry_after
        self._queue: deque[tuple[int, Build]] = deque()
        self._queued = 0
        """Spans in the queue."""
        self._idle = False
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def offer(self, count: int, build: Build) -> None:
        """Queue `count` spans, built when they are exported. What goes beyond the capacity drops, counted."""
        with self._changed:
            if self._closing or self._queued + count > self._capacity:
                self.dropped += count
            else:
                self._queue.append((count, build))
                self._queued += count

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span of the OpenTelemetry SDK."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.offer(1, lambda: (span,))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until everything queued is exported. False when the exporter fails or time runs out first."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failing or self._empty(), timeout_millis / 1000)
            return self._empty()

    def shutdown(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Export what is queued, unless the exporter fails, and end the thread; within `seconds`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _empty(self) -> bool:
        return self._idle and not self._queue

    def _run(self) -> None:
        if self._export(1, [self._startup_span]):
            log.info("traces: %s; it acknowledged the start-up span", self._destination)
        while (batch := self._next_batch()) is not None:
            count, builds = batch
            if builds:
                self._export(count, builds)
        self._exporter.shutdown()

    def _next_batch(self) -> tuple[int, list[Build]] | None:
        """Wait for the next export: how many spans, and what builds them. None ends the thread."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            if not self._closing and (self._failing or self._queued < BATCH_SPANS):
                self._changed.wait(self._retry_after if self._failing else self._interval)
            if self._closing and (self._failing or not self._queue):
                self.dropped += self._queued
                self._queue.clear()
                return None
            self._idle = False
            count, builds = 0, []
            while self._queue and count < BATCH_SPANS:
                spans, build = self._queue.popleft()
                count += spans
                builds.append(build)
            self._queued -= count
            return count, builds

    def _export(self, count: int, builds: Sequence[Build]) -> bool:
        try:
            spans = [span for build in builds for span in build()]
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            log.debug("span exporter raised", exc_info=True)
            taken = False
        if taken:
            self.exported += count
            if self._failing:
                log.warning("traces: %s works again; %d spans were lost", self._destination, self.dropped)
        else:
            with self._changed:
                self.dropped += count
            if not self._failing:
                log.warning(
                    "traces: %s does not take spans; they are dropped and counted until it does "
                    "(serving is not affected)",
                    self._destination,
                )
        self._failing = not taken
        return taken

    def _startup_span(self) -> Sequence[ReadableSpan]:
        ids = RandomIdGenerator()
        context = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, SAMPLED)
        now = time.time_ns()
        return [
            ReadableSpan(
                STARTUP_SPAN,
                context,
                None,
                self.resource,
                start_time=now,
                end_time=now,
                instrumentation_scope=SCOPE,
            )
        ]


class JsonLinesExporter(SpanExporter):
    """OTLP JSON, one export request a line, in a ring of files per emitting process.

    Any line can be sent to a collector as it is (`POST /v1/traces`, `application/json`), and the
    collector's otlpjsonfile receiver reads the files. Format:
    https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
    """

    def __init__(
        self,
        directory: Path,
        instance: str,
        *,
        file_bytes: int = 8 << 20,
        files: int = 4,
        directory_bytes: int = 128 << 20,
    ) -> None:
        self._directory = directory
        self._stem = f"{instance}-{os.getpid()}"
        self._file_bytes = file_bytes
        self._files = files
        self._directory_bytes = directory_bytes
        self._number = 0
        self._written = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = json.dumps(otlp_json(spans), separators=(",", ":")).encode() + b"\n"
        if self._written and self._written + len(line) > self._file_bytes:
            self._number += 1
            self._written = 0
            (self._directory / f"{self._stem}-{self._number - self._files}.jsonl").unlink(missing_ok=True)
        if not self._written:
            # Not in the constructor: a directory that cannot be written costs spans, not the service.
            self._directory.mkdir(parents=True, exist_ok=True)
            self._prune()
        with (self._directory / f"{self._stem}-{self._number}.jsonl").open("ab") as file:
            file.write(line)
        self._written += len(line)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Every line is on disk already."""

    def _prune(self) -> None:
        """Keep the directory, which outlives its writers, within bounds: oldest files go first."""
        found: list[tuple[os.stat_result, Path]] = []
        for path in self._directory.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # Other processes prune the same directory.
                found.append((path.stat(), path))
        total = sum(stat.st_size for stat, _ in found)
        for stat, path in sorted(found, key=lambda item: item[0].st_mtime):
            if total <= self._directory_bytes - self._file_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size


def otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """An OTLP ExportTraceServiceRequest in its JSON form; the spans share one resource.

    Written out by hand since opentelemetry-exporter-otlp-json-file takes twice as long, and has no ring.
    """
    resource = spans[0].resource.attributes
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": SCOPE.name}, "spans": [_span(span) for span in spans]}],
            }
        ]
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    line: dict[str, Any] = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP counts from 1: 0 is "unspecified".
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
    }
    if span.parent is not None:
        line["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.events:
        line["events"] = [
            {"name": e.name, "timeUnixNano": str(e.timestamp), "attributes": _attributes(e.attributes)}
            for e in span.events
        ]
    if span.links:
        line["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
                "attributes": _attributes(link.attributes),
            }
            for link in span.links
        ]
    if span.status.status_code.value:
        line["status"] = {"code": span.status.status_code.value, "message": span.status.description or ""}
    return line


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever OpenTelemetry allows as an attribute
    match value:
        case str():
            return {"stringValue": value}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"arrayValue": {"values": [_value(item) for item in value]}}
