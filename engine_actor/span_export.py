"""Where spans go: an OTLP/HTTP collector, or a bounded ring of files when none is named.

A sink never blocks its caller: it queues, a thread exports, and what does not fit is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
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

QUEUED_SPANS = 4096
"""Spans a sink holds at most: some 20 seconds of a busy engine."""
BATCH_SPANS = 512
EXPORT_TIMEOUT = 5.0
"""Seconds one export may take, retries included."""
RETRY_AFTER = 15.0
"""Seconds to leave a collector alone that failed; spans queue meanwhile, and drop when full."""


def service_resource(instance: str, version: str) -> Resource:
    """Who emits. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before our own `service.name`."""
    resource = Resource.create({SERVICE_VERSION: version, SERVICE_INSTANCE_ID: instance})
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.getenv("OTEL_RESOURCE_ATTRIBUTES", "")
    return resource if named else resource.merge(Resource({SERVICE_NAME: "slotserve"}))


def open_exporter(run_dir: Path, instance: str) -> tuple[SpanExporter, str]:
    """The exporter the environment asks for, and where it leads, in words.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names a collector; its other
    variables (headers, certificates, compression) hold as OpenTelemetry defines them.
    """
    traces = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if traces or base:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # The sink warns instead.
        return OTLPSpanExporter(timeout=EXPORT_TIMEOUT), f"OTLP/HTTP to {traces or base}"
    directory = run_dir / "traces"
    return JsonLinesExporter(directory, instance), f"OTLP JSON lines in {directory}"


def open_sink(instance: str, config: TelemetryConfig) -> SpanSink | None:
    """The sink of one process; None where tracing is off."""
    if not config.tracing:
        return None
    exporter, destination = open_exporter(Path(config.run_dir), instance)
    return SpanSink(exporter, destination, service_resource(instance, config.version))


class SpanSink(SpanProcessor):
    """A bounded queue and the thread that empties it into an exporter.

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
        interval: float = 0.5,
        retry_after: float = RETRY_AFTER,
    ) -> None:
        self.resource = resource
        self.exported = 0
        self.dropped = 0
        self._exporter = exporter
        self._destination = destination
        self._capacity = capacity
        self._interval = interval
        self._retry_after = retry_after
        self._queue: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._idle = True
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def offer(self, spans: Iterable[ReadableSpan]) -> None:
        """Queue spans for export; those beyond the capacity are dropped and counted."""
        with self._changed:
            for span in spans:
                if self._closing or len(self._queue) >= self._capacity:
                    self.dropped += 1
                else:
                    self._queue.append(span)

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span of the OpenTelemetry SDK."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.offer((span,))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until everything queued is exported or lost. False when time runs out first."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            self._changed.notify_all()
            while self._queue or not self._idle:
                if self._failing or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def shutdown(self) -> None:
        """Export what is queued, unless the exporter fails, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=2 * EXPORT_TIMEOUT)

    def _run(self) -> None:
        if self._export([self._startup_span()]):
            log.info("traces: %s; it acknowledged the start-up span", self._destination)
        while (batch := self._next_batch()) is not None:
            if batch:
                self._export(batch)
        self._exporter.shutdown()

    def _next_batch(self) -> list[ReadableSpan] | None:
        """Wait for the next export's spans; None ends the thread."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            if not self._closing and (self._failing or len(self._queue) < BATCH_SPANS):
                self._changed.wait(self._retry_after if self._failing else self._interval)
            if self._closing and (self._failing or not self._queue):
                self.dropped += len(self._queue)
                self._queue.clear()
                return None
            self._idle = False
            return [self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))]

    def _export(self, batch: Sequence[ReadableSpan]) -> bool:
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            log.debug("span exporter raised", exc_info=True)
            taken = False
        if taken:
            self.exported += len(batch)
            if self._failing:
                log.warning("traces: %s works again; %d spans were lost", self._destination, self.dropped)
        else:
            self.dropped += len(batch)
            if not self._failing:
                log.warning(
                    "traces: %s does not take spans; they are dropped and counted until it does "
                    "(serving is not affected)",
                    self._destination,
                )
        self._failing = not taken
        return taken

    def _startup_span(self) -> ReadableSpan:
        ids = RandomIdGenerator()
        context = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, SAMPLED)
        now = time.time_ns()
        return ReadableSpan(
            STARTUP_SPAN,
            context,
            None,
            self.resource,
            start_time=now,
            end_time=now,
            instrumentation_scope=SCOPE,
        )


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

    Written out by hand since protobuf's own conversion takes six times as long.
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
        case bool():
            return {"boolValue": value}
        case str():
            return {"stringValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"arrayValue": {"values": [_value(item) for item in value]}}
