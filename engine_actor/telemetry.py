"""Tells of the step loop: a history of steps, metrics, spans.

The step thread only appends to a queue. Everything else happens on a thread of its own, in batches,
so that it takes the interpreter for short moments and not once per step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric

from engine_actor.history import StepHistory
from engine_actor.messages import TelemetryConfig
from engine_actor.metrics import EngineMetrics
from engine_actor.records import Occupancy, StepRecord
from engine_actor.request import Request
from engine_actor.span_export import open_sink
from engine_actor.spans import SpanRecorder

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Steps that may wait to be looked at; more are not recorded, and counted."""
BATCH_SECONDS = 0.25
MIRROR_SECONDS = 5.0
"""Ray's processes report every ten seconds, and forget a gauge that is not set again for long."""
CLOSE_SECONDS = 2.0
"""The longest that a dying engine waits for its last spans to be exported."""


class Gauge(Protocol):
    """`ray.util.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]
"""Takes name, description, labels."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    request: Request


@dataclass(frozen=True, slots=True)
class _Stepped:
    record: StepRecord


@dataclass(frozen=True, slots=True)
class _Ended:
    request: Request


class Recorder(Protocol):
    """Keeps something of what happened. Told on one thread, in order."""

    def submitted(self, request: Request) -> None: ...
    def stepped(self, record: StepRecord) -> None: ...
    def ended(self, request: Request, at: float) -> None: ...


class Telemetry:
    """An observer of the step loop (see Observer), and what others ask about it."""

    def __init__(
        self,
        history: StepHistory,
        metrics: EngineMetrics,
        spans: SpanRecorder | None = None,
        *,
        mirror: MakeGauge | None = None,
    ) -> None:
        self.history = history
        self.metrics = metrics
        self._spans = spans
        self._recorders: list[Recorder] = [history, metrics] if spans is None else [history, metrics, spans]
        self._mirror = mirror
        self._mirrored: dict[str, Gauge] = {}
        self._mirrored_at = -math.inf
        self._occupancy: Callable[[], Occupancy] | None = None
        self._events: deque[_Submitted | _Stepped | _Ended] = deque()
        self._step_end = 0.0
        self._dropped = 0
        self._seen = threading.Lock()
        """Held while events are processed."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    # On the step thread.

    def on_start(self, occupancy: Callable[[], Occupancy]) -> None:
        """The engine is built."""
        self._occupancy = occupancy

    def on_submit(self, request: Request) -> None:
        """A request has reached the engine."""
        self._append(_Submitted(request))

    def on_step(self, record: StepRecord) -> None:
        """A step is over."""
        if len(self._events) < BACKLOG:
            self._append(_Stepped(record))
        else:
            self._dropped += 1

    def on_end(self, request: Request) -> None:
        """A request has left the engine: finished, aborted, failed or refused."""
        self._append(_Ended(request))

    def _append(self, event: _Submitted | _Stepped | _Ended) -> None:
        self._events.append(event)
        if not self._wake.is_set():
            self._wake.set()

    # On any thread.

    def flush(self) -> None:
        """Look at everything that has happened so far."""
        with self._seen:
            self._process()

    def steps_of_last(self, seconds: float) -> list[bytes]:
        """See StepHistory.steps_of_last."""
        self.flush()
        return self.history.steps_of_last(seconds)

    def news(self, since: int) -> tuple[int, bytes]:
        """See StepHistory.news."""
        self.flush()
        return self.history.news(since)

    def figures(self) -> list[Metric]:
        """The metrics' families, with everything counted that has happened so far, and gauges as of now."""
        with self._seen:
            self._process()
            return self._figures()

    def close(self, unfinished: StepRecord | None = None, *, seconds: float = CLOSE_SECONDS) -> None:
        """Look at what is left, with the step that the engine died in, export it and end.

        Within `seconds`: what takes longer is lost.
        """
        deadline = time.monotonic() + seconds
        if unfinished is not None:
            self._append(_Stepped(unfinished))
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._spans is not None and not self._thread.is_alive():
            now = time.monotonic()
            self._spans.close(now, deadline - now)

    # On the telemetry thread.

    def _run(self) -> None:
        closing = False
        while not closing:
            if self._wake.wait(MIRROR_SECONDS):
                self._closing.wait(BATCH_SECONDS)
                self._wake.clear()
            closing = self._closing.is_set()
            try:
                self.flush()
                self._show_mirror()
            except Exception:
                log.exception("telemetry failed; the engine is not affected")

    def _process(self) -> None:
        while self._events:
            match self._events.popleft():
                case _Submitted(request):
                    for recorder in self._recorders:
                        recorder.submitted(request)
                case _Stepped(record):
                    self._step_end = record.started + record.seconds
                    for recorder in self._recorders:
                        recorder.stepped(record)
                case _Ended(request):
                    # A finished request's last token is out with its step; others end when they are dropped.
                    finished = request.finish_reason in ("stop", "length")
                    at = self._step_end if finished else request.finished or request.arrival
                    for recorder in self._recorders:
                        recorder.ended(request, at)

    def _figures(self) -> list[Metric]:
        self.metrics.gauge(self._occupancy and self._occupancy(), self.history.waiting())
        self.metrics.records_dropped.total(self._dropped)
        if self._spans is not None:
            self.metrics.spans_exported.total(self._spans.sink.exported)
            self.metrics.spans_dropped.total(self._spans.sink.dropped)
        return self.metrics.families()

    def _show_mirror(self) -> None:
        """Every sample as a gauge: Ray's counters and histograms take one event at a time."""
        if self._mirror is None or time.monotonic() - self._mirrored_at < MIRROR_SECONDS:
            return
        self._mirrored_at = time.monotonic()
        for family in self.figures():
            for sample in family.samples:
                if sample.name not in self._mirrored:
                    labels = tuple(sample.labels)
                    self._mirrored[sample.name] = self._mirror(sample.name, family.documentation, labels)
                self._mirrored[sample.name].set(sample.value, sample.labels)


def open_telemetry(name: str, config: TelemetryConfig, mirror: MakeGauge | None = None) -> Telemetry:
    """The telemetry of one engine, exporting as the environment says."""
    metrics = EngineMetrics(name, {"version": config.version, **config.labels})
    spans = None
    if (sink := open_sink(name, config)) is not None:
        policy = config.labels.get("policy", "")
        spans = SpanRecorder(name, sink, policy=policy, link_all_steps=config.trace_all_steps)
    return Telemetry(StepHistory(name), metrics, spans, mirror=mirror)
