"""Watches the step loop: spans and metrics per step and per request, and a ring of the last steps.

The step thread only appends to a queue. Everything else happens on a thread of its own, in batches,
so that it takes the interpreter for short moments and not once per step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray.util.metrics
from opentelemetry.trace import SpanContext
from prometheus_client.metrics_core import Metric

from engine_actor.clock import wall
from engine_actor.messages import TelemetryConfig
from engine_actor.metrics import EngineMetrics
from engine_actor.records import Share, StepRecord
from engine_actor.request import PreemptReason, Request
from engine_actor.span_export import SpanSink, open_sink
from engine_actor.spans import (
    MAX_CHUNK_EVENTS,
    MAX_STAGES,
    Stage,
    StageName,
    parse_context,
    request_spans,
    step_spans,
)
from engine_actor.step_wire import encode_step, page_message

log = logging.getLogger(__name__)

HISTORY_SECONDS = 600
"""How far back steps are kept, and the most that can be asked for."""
HISTORY_BYTES = 64 << 20
"""Encoded steps kept at most: ten minutes at 60 a second with 16 slots, less with more."""
BACKLOG = 4096
"""Steps that may wait to be looked at; more are not recorded, and counted."""
NEWS_STEPS = 128
"""Steps one message to live pages holds at most: they are asked for a few times a second."""
BATCH_SECONDS = 0.05
IDLE_SECONDS = 5.0
"""Pause between looks while nothing happens: gauges in Ray need to be refreshed now and then."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    request: Request


@dataclass(frozen=True, slots=True)
class _Stepped:
    record: StepRecord


@dataclass(frozen=True, slots=True)
class _Ended:
    request: Request


@dataclass(slots=True)
class _Life:
    """A request as far as the records have told it."""

    request: Request
    tenant: str
    """The metric label."""
    parent: SpanContext | None
    stages: list[Stage]
    computed: int = 0
    """Most tokens ever cached for it: those below are recomputed when prefilled again."""
    last_token: float | None = None
    waits: bool = False


class Telemetry:
    """An observer of the step loop (on_submit, on_step, on_end), and what others ask about it."""

    def __init__(
        self,
        engine: str,
        metrics: EngineMetrics,
        sink: SpanSink | None,
        *,
        policy: str,
        link_all_steps: bool = False,
        history_bytes: int = HISTORY_BYTES,
        history_seconds: float = HISTORY_SECONDS,
    ) -> None:
        self.metrics = metrics
        self._engine = engine
        self._sink = sink
        self._policy = policy
        self._link_all_steps = link_all_steps
        self._history_bytes = history_bytes
        self._history_seconds = history_seconds
        self._events: deque[_Submitted | _Stepped | _Ended] = deque()
        self._dropped = 0
        self._dropped_told = 0
        self._seen = threading.Lock()
        """Held while events are processed."""
        self._wake = threading.Event()
        self._closing = False
        self._lives: dict[str, _Life] = {}
        self._waiting: dict[str, int] = {}
        self._news: dict[str, list[Any]] = {"arrived": [], "ended": []}
        self._latest: StepRecord | None = None
        self._refreshed = 0.0
        self._spans_out = (0, 0)
        self._ring: deque[tuple[int, float, bytes]] = deque()
        self._ring_bytes = 0
        self._ring_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    # On the step thread.

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

    def steps_since(self, number: int, limit: int) -> tuple[int, list[bytes]]:
        """The newest step's number, and the encoded steps after step `number`: the newest `limit` of them,
        the oldest first."""
        found: list[bytes] = []
        with self._ring_lock:
            newest = self._ring[-1][0] if self._ring else -1
            for step, _, line in reversed(self._ring):
                if step <= number or len(found) == limit:
                    break
                found.append(line)
        return newest, found[::-1]

    def steps_of_last(self, seconds: float) -> list[bytes]:
        """Encoded steps that started within the last `seconds` up to now, the oldest first."""
        self.flush()
        since = time.monotonic() - seconds
        with self._ring_lock:
            return [line for _, started, line in self._ring if started >= since]

    def news(self, since: int) -> tuple[int, bytes]:
        """The newest step's number, and a message for live pages with the steps after `since`.

        Of very many steps the newest NEWS_STEPS; of -1 in any case, as for a page that has just come.
        """
        newest, steps = self.steps_since(since, NEWS_STEPS)
        return newest, page_message(self._engine, steps, wall(time.monotonic()), self.waiting())

    def figures(self) -> list[Metric]:
        """The metrics' families, with everything counted that has happened so far."""
        with self._seen:
            self._process()
            self._refresh()
            return self.metrics.families()

    def waiting(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        return {tenant: count for tenant, count in self._waiting.copy().items() if count}

    def close(self) -> None:
        """Look at what is left, and end the thread. The sink stays its owner's to shut down."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=5)

    # On the telemetry thread.

    def _run(self) -> None:
        while not self._closing:
            if self._wake.wait(IDLE_SECONDS) and not self._closing:
                time.sleep(BATCH_SECONDS)
                self._wake.clear()
            try:
                self.flush()
            except Exception:
                log.exception("telemetry failed; the engine is not affected")

    def _process(self) -> None:
        while self._events:
            match self._events.popleft():
                case _Submitted(request):
                    self._submitted(request)
                case _Stepped(record):
                    self._stepped(record)
                case _Ended(request):
                    self._ended(request)
        if time.monotonic() - self._refreshed >= 1.0:
            self._refresh()

    def _submitted(self, request: Request) -> None:
        queue = Stage("queue", request.arrival, request.arrival)
        tenant = self.metrics.tenant(request.tenant)
        parent = parse_context(request.trace_context) if self._sink else None
        life = _Life(request, tenant, parent, [queue], last_token=request.last_token)
        self._lives[request.id] = life
        self._waits(life, True)
        self._news["arrived"].append(
            [request.id, request.tenant, wall(request.arrival), request.prompt_len, request.params.max_tokens]
        )

    def _stepped(self, record: StepRecord) -> None:
        self._latest = record
        self.metrics.stepped(record)
        context: SpanContext | None = None
        if self._sink is not None:
            spans = step_spans(record, self._engine, self._policy, self._sink.resource)
            context = spans[0].context
            self._sink.offer(spans)
        for request_id, reason in record.preempted.items():
            self.metrics.preemptions.inc(reason=reason)
            if (life := self._lives.get(request_id)) is not None:
                self._next_stage(life, "preempted", record.started, reason)
                self._waits(life, True)
        for request_id in record.admitted:
            if (life := self._lives.get(request_id)) is not None:
                self._admitted(life, record)
        for share in record.shares:
            if (life := self._lives.get(share.request_id)) is not None:
                self._served(life, share, record, context)
        self._keep(record)

    def _admitted(self, life: _Life, record: StepRecord) -> None:
        self._waits(life, False)
        if len(life.stages) == 1:
            life.stages[0].start = life.request.queued
            self.metrics.queue_time.observe(record.started - life.request.queued, tenant=life.tenant)
            if not life.request.resumed:
                self.metrics.prompt_tokens.inc(life.request.prompt_len, tenant=life.tenant)
        self._next_stage(life, "prefill", record.started)

    def _served(self, life: _Life, share: Share, record: StepRecord, context: SpanContext | None) -> None:
        self._waits(life, False)
        stage = life.stages[-1]
        stage.slot = share.slot
        if context is not None:
            stage.rode_in(record.number, record.seconds, context, keep=self._link_all_steps)
        if share.kind == "prefill":
            stage.tokens += share.tokens
            stage.chunk_count += 1
            if len(stage.chunks) < MAX_CHUNK_EVENTS:
                stage.chunks.append((record.started, record.number, share.start, share.tokens))
            self.metrics.recomputed_tokens.inc(max(0, min(life.computed - share.start, share.tokens)))
        life.computed = max(life.computed, share.start + share.tokens)
        if share.sampled:
            self._token(life, share, record)

    def _token(self, life: _Life, share: Share, record: StepRecord) -> None:
        # A token is out when its step is over: that is when its frame leaves.
        now = record.started + record.seconds
        if share.kind == "prefill":
            self._next_stage(life, "decode", now)
        else:
            life.stages[-1].tokens += 1
        self.metrics.output_tokens.inc(tenant=life.tenant)
        if life.last_token is not None:
            # Another engine's clock may be ahead of this one's.
            self.metrics.itl.observe(max(0.0, now - life.last_token), tenant=life.tenant)
        elif not life.request.resumed:
            self.metrics.ttft.observe(now - life.request.arrival, tenant=life.tenant)
        life.last_token = now

    def _ended(self, request: Request) -> None:
        reason = request.finish_reason or "error"
        if (life := self._lives.pop(request.id, None)) is None:
            return
        self._waits(life, False)
        # A finished request's last token is out with its step; an aborted one ends when it is dropped.
        at_step = life.last_token if reason in ("stop", "length") else None
        end = at_step or request.finished or request.queued
        self.metrics.requests.inc(tenant=life.tenant, finish_reason=reason)
        if reason == "abort":
            self.metrics.aborts.inc(tenant=life.tenant)
        else:
            self.metrics.e2e.observe(max(0.0, end - request.arrival), tenant=life.tenant)
        life.stages[-1].end = max(end, life.stages[-1].start)
        if life.parent is not None and life.parent.trace_flags.sampled and self._sink is not None:
            stages = [stage for stage in life.stages if stage.name != "decode" or stage.tokens]
            self._sink.offer(
                request_spans(request.id, life.parent, stages, self._engine, self._sink.resource, reason)
            )
        self._news["ended"].append([request.id, reason, wall(end)])

    def _next_stage(
        self, life: _Life, name: StageName, at: float, reason: PreemptReason | None = None
    ) -> None:
        life.stages[-1].end = max(at, life.stages[-1].start)
        life.stages.append(Stage(name, life.stages[-1].end, life.stages[-1].end, reason=reason))
        if len(life.stages) > MAX_STAGES:
            del life.stages[1]

    def _waits(self, life: _Life, waits: bool) -> None:
        # A record that was dropped may have told of the change before.
        if waits is not life.waits:
            life.waits, tenant = waits, life.request.tenant
            self._waiting[tenant] = self._waiting.get(tenant, 0) + (1 if waits else -1)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _keep(self, record: StepRecord) -> None:
        news, self._news = self._news, {"arrived": [], "ended": []}
        line = encode_step(record, {"queue": dict(self._waiting), **news})
        horizon = record.started - self._history_seconds
        with self._ring_lock:
            self._ring.append((record.number, record.started, line))
            self._ring_bytes += len(line)
            while len(self._ring) > 1 and (
                self._ring[0][1] < horizon or self._ring_bytes > self._history_bytes
            ):
                self._ring_bytes -= len(self._ring.popleft()[2])

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        self.metrics.gauge_all(self._latest, self._waiting)
        dropped = self._dropped
        self.metrics.records_dropped.inc(dropped - self._dropped_told)
        self._dropped_told = dropped
        if self._sink is not None:
            exported, dropped = self._sink.exported, self._sink.dropped
            self.metrics.spans_exported.inc(exported - self._spans_out[0])
            self.metrics.spans_dropped.inc(dropped - self._spans_out[1])
            self._spans_out = (exported, dropped)


def open_telemetry(name: str, config: TelemetryConfig) -> Telemetry:
    """The telemetry of an engine that runs as a Ray actor, exporting as the environment says."""
    info = {"version": config.version, **config.labels}
    metrics = EngineMetrics(name, info, ray.util.metrics, slots=config.slots)
    policy = config.labels.get("policy", "")
    sink = open_sink(name, config)
    return Telemetry(name, metrics, sink, policy=policy, link_all_steps=config.trace_all_steps)
