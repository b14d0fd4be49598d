"""What a step or a request did, as OpenTelemetry spans.

The spans are put together when a batch of them is exported, from what the step records say,
with the times the engine measured; nothing is timed by the tracing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_actor.clock import wall
from engine_actor.records import Share, StepRecord
from engine_actor.request import FinishReason, PreemptReason, Request
from engine_actor.span_export import SAMPLED, SCOPE, SpanSink

MAX_REQUEST_IDS = 64
"""Request ids a step span lists; their number is always exact."""
MAX_CHUNK_EVENTS = 128
MAX_STAGES = 64
"""Stages a request keeps; a request preempted more often than that loses its oldest."""
MAX_STEP_LINKS = 4096

StageName = Literal["queue", "prefill", "decode", "preempted"]

_ids = RandomIdGenerator()


def parse_context(carrier: Mapping[str, str]) -> SpanContext | None:
    """The caller's span from W3C `traceparent` and `tracestate`; None when absent or malformed."""
    context = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    return context if context.is_valid else None


def child_context(parent: SpanContext | None) -> SpanContext:
    """A new span's ids: in its parent's trace, or in a trace of its own."""
    trace_id = _ids.generate_trace_id() if parent is None else parent.trace_id
    return SpanContext(trace_id, _ids.generate_span_id(), False, SAMPLED)


@dataclass(slots=True)
class Stage:
    """A stretch of a request's life; consecutive ones leave no gap."""

    name: StageName
    start: float
    end: float
    tokens: int = 0
    """Prefilled or generated."""
    cached: int = 0
    """Prefill only: tokens found computed."""
    slot: int | None = None
    reason: PreemptReason | None = None
    """`preempted` only."""
    chunks: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Prefill only: (time, step, first position, tokens), the first MAX_CHUNK_EVENTS of them."""
    chunk_count: int = 0
    first_step: tuple[int, SpanContext] | None = None
    last_step: tuple[int, SpanContext] | None = None
    slowest_step: tuple[int, SpanContext] | None = None
    slowest_seconds: float = -1.0
    all_steps: list[tuple[int, SpanContext]] = field(default_factory=list)

    def rode_in(self, step: tuple[int, SpanContext], seconds: float, *, keep: bool) -> None:
        """Remember a step for the links: the first, the last, the slowest, and with `keep` all."""
        self.first_step = self.first_step or step
        self.last_step = step
        if seconds > self.slowest_seconds:
            self.slowest_step, self.slowest_seconds = step, seconds
        if keep and len(self.all_steps) < MAX_STEP_LINKS:
            self.all_steps.append(step)

    def links(self) -> list[Link]:
        """One link per step, saying which of first, last and slowest it was."""
        roles: dict[int, tuple[SpanContext, list[str]]] = {
            step: (context, []) for step, context in self.all_steps
        }
        marked = (("first", self.first_step), ("last", self.last_step), ("slowest", self.slowest_step))
        for role, known in marked:
            if known is not None:
                roles.setdefault(known[0], (known[1], []))[1].append(role)
        return [
            Link(context, {"slotserve.step.number": step, "slotserve.step.role": names or ["ridden"]})
            for step, (context, names) in roles.items()
        ]


@dataclass(slots=True)
class _Life:
    """A request whose spans somebody wants."""

    request: Request
    parent: SpanContext | None
    """The span of the HTTP request; without one there is no trace for the stages to be in."""
    stages: list[Stage]

    def next_stage(self, name: StageName, at: float, reason: PreemptReason | None = None) -> None:
        end = self.stages[-1].end = max(at, self.stages[-1].start)
        self.stages.append(Stage(name, end, end, reason=reason))
        if len(self.stages) > MAX_STAGES:
            del self.stages[1]


class SpanRecorder:
    """A trace for each step, and each request's stages under the span of its HTTP request.

    A request that its caller does not sample has no spans, nor has a step that only serves such.
    """

    def __init__(self, engine: str, sink: SpanSink, *, policy: str, link_all_steps: bool = False) -> None:
        self.sink = sink
        self._engine = engine
        self._policy = policy
        self._link_all_steps = link_all_steps
        self._lives: dict[str, _Life] = {}

    def submitted(self, request: Request) -> None:
        """A request has reached the engine."""
        parent = parse_context(request.trace_context)
        if parent is None or parent.trace_flags.sampled:
            queue = Stage("queue", request.arrival, request.arrival)
            self._lives[request.id] = _Life(request, parent, [queue])

    def stepped(self, record: StepRecord) -> None:
        """A step is over."""
        for request_id, reason in record.preempted.items():
            if (life := self._lives.get(request_id)) is not None:
                life.next_stage("preempted", record.started, reason)
        for request_id in record.admitted:
            if (life := self._lives.get(request_id)) is not None:
                life.next_stage("prefill", record.started)
        served = [(life, share) for share in record.shares if (life := self._lives.get(share.request_id))]
        if not served:
            return
        context = child_context(None)
        build = partial(step_spans, record, context, self._engine, self._policy, self.sink.resource)
        self.sink.offer(1 + len(record.intervals), build)
        step, seconds = (record.number, context), record.seconds
        for life, share in served:
            life.stages[-1].rode_in(step, seconds, keep=self._link_all_steps)
            _serve(life, share, record, record.started + seconds)

    def ended(self, request: Request, at: float) -> None:
        """A request has left the engine."""
        if (life := self._lives.pop(request.id, None)) is not None:
            self._end(life, request.finish_reason or "error", at)

    def close(self, at: float, seconds: float) -> None:
        """The engine ends, and so does everything that is still in it; export for `seconds` at most."""
        for life in self._lives.values():
            self._end(life, "error", at)
        self.sink.shutdown(seconds)

    def _end(self, life: _Life, reason: FinishReason, at: float) -> None:
        if life.parent is None:
            return
        stages = life.stages
        if len(stages) > 1:
            stages[0].start = life.request.queued
        stages[-1].end = max(at, stages[-1].start)
        stages = [stage for stage in stages if stage.name != "decode" or stage.tokens]
        build = partial(
            request_spans, life.request.id, life.parent, stages, self._engine, self.sink.resource, reason
        )
        self.sink.offer(len(stages), build)


def _serve(life: _Life, share: Share, record: StepRecord, end: float) -> None:
    stage = life.stages[-1]
    stage.slot = share.slot
    if share.kind == "decode":
        stage.tokens += share.sampled
        return
    stage.tokens += share.tokens
    stage.cached += record.reused.get(share.request_id, 0)
    stage.chunk_count += 1
    if len(stage.chunks) < MAX_CHUNK_EVENTS:
        stage.chunks.append((record.started, record.number, share.start, share.tokens))
    if share.sampled:
        # A token is out when its step is over: that is when its frame leaves.
        life.next_stage("decode", end)


def step_spans(
    record: StepRecord, context: SpanContext, engine: str, policy: str, resource: Resource
) -> list[ReadableSpan]:
    """`engine.step`, whose `context` is given, then a child for each interval of the step."""
    requests = list(dict.fromkeys(share.request_id for share in record.shares))
    prefill = sum(share.tokens for share in record.shares if share.kind == "prefill")
    attributes: dict[str, Any] = {
        "slotserve.engine": engine,
        "slotserve.policy": policy,
        "slotserve.step.number": record.number,
        "slotserve.step.rows.prefill": prefill,
        "slotserve.step.rows.decode": sum(share.tokens for share in record.shares) - prefill,
        "slotserve.step.rows.padding": record.padded_rows - record.rows,
        "slotserve.step.forwards": record.forwards,
        "slotserve.step.request_ids": requests[:MAX_REQUEST_IDS],
        "slotserve.step.request_count": len(requests),
        "slotserve.step.admitted": len(record.admitted),
        "slotserve.step.preemptions": len(record.preempted),
        "slotserve.step.reused_tokens": sum(record.reused.values()),
        "slotserve.step.finished": len(record.finished),
        "slotserve.step.errors": record.errors,
        "slotserve.requests.waiting": record.waiting,
        "slotserve.requests.running": record.running,
        "slotserve.slots.free": record.free_slots,
        "slotserve.kv.tokens": record.kv_tokens,
        "slotserve.kv.budget_tokens": record.kv_budget,
    }
    for phase, seconds in record.phases.items():
        attributes[f"slotserve.step.{phase}_us"] = round(seconds * 1e6, 1)
    start = _ns(wall(record.started))
    status = Status(StatusCode.ERROR, "a forward failed") if record.errors else Status()
    spans = [
        _span("engine.step", context, None, resource, attributes, start, start + _ns(record.seconds), status)
    ]
    for interval in record.intervals:
        begin, end = start + _ns(interval.offset), start + _ns(interval.offset + interval.seconds)
        name = f"engine.{interval.phase}"
        spans.append(_span(name, child_context(context), context, resource, {}, begin, end))
    return spans


def request_spans(
    request_id: str,
    parent: SpanContext,
    stages: Sequence[Stage],
    engine: str,
    resource: Resource,
    finish_reason: FinishReason,
) -> list[ReadableSpan]:
    """The engine's part of a request's tree: one span per stage, children of the HTTP root span."""
    spans = []
    recomputing = False
    for stage in stages:
        attributes: dict[str, Any] = {"slotserve.request.id": request_id, "slotserve.engine": engine}
        if stage.slot is not None:
            attributes["slotserve.slot"] = stage.slot
        if stage.name == "prefill":
            attributes |= {
                "slotserve.prefill.tokens": stage.tokens,
                "slotserve.prefill.cached_tokens": stage.cached,
                "slotserve.prefill.chunks": stage.chunk_count,
                "slotserve.prefill.recompute": recomputing,
            }
        elif stage.name == "decode":
            attributes["slotserve.decode.tokens"] = stage.tokens
        elif stage.reason is not None:
            attributes["slotserve.preemption.reason"] = stage.reason
        recomputing |= stage.name == "preempted"
        events = [
            Event(
                "chunk",
                {
                    "slotserve.step.number": step,
                    "slotserve.chunk.start": start,
                    "slotserve.chunk.tokens": tokens,
                },
                timestamp=_ns(wall(at)),
            )
            for at, step, start, tokens in stage.chunks
        ]
        failed = stage is stages[-1] and finish_reason == "error"
        spans.append(
            _span(
                stage.name,
                child_context(parent),
                parent,
                resource,
                attributes,
                _ns(wall(stage.start)),
                _ns(wall(stage.end)),
                Status(StatusCode.ERROR, "the engine failed") if failed else Status(),
                events,
                stage.links(),
            )
        )
    return spans


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    attributes: Mapping[str, Any],
    start: int,
    end: int,
    status: Status = Status(),  # noqa: B008 - unset, and nobody changes it
    events: Sequence[Event] = (),
    links: Sequence[Link] = (),
) -> ReadableSpan:
    # An own object and not the SDK's live span: that one locks, reads clocks and costs ten times as much.
    return ReadableSpan(
        name,
        context,
        parent,
        resource,
        attributes,
        events,
        links,
        status=status,
        start_time=start,
        end_time=end,
        instrumentation_scope=SCOPE,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
