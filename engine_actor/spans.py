"""What a step or a request did, as OpenTelemetry spans.

The spans are put together off the step thread and after the fact, from what the step records say,
with the times the engine measured; nothing is timed by the tracing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_actor.clock import wall
from engine_actor.records import StepRecord
from engine_actor.request import FinishReason, PreemptReason
from engine_actor.span_export import SAMPLED, SCOPE

MAX_REQUEST_IDS = 64
"""Request ids a step span lists; their number is always exact."""
MAX_CHUNK_EVENTS = 128
MAX_STAGES = 64
"""Stages a request keeps; a request preempted more often than that loses its oldest."""
MAX_STEP_LINKS = 4096

StageName = Literal["queue", "prefill", "decode", "preempted"]

_ids = RandomIdGenerator()


def parse_context(carrier: Mapping[str, str] | None) -> SpanContext | None:
    """The caller's span from W3C `traceparent` and `tracestate`; None when absent or malformed."""
    context = get_current_span(TraceContextTextMapPropagator().extract(carrier or {})).get_span_context()
    return context if context.is_valid else None


def child_context(parent: SpanContext | None) -> SpanContext:
    """A new span's ids: in its parent's trace, or in a trace of its own."""
    trace_id = _ids.generate_trace_id() if parent is None else parent.trace_id
    return SpanContext(trace_id, _ids.generate_span_id(), False, SAMPLED)


def step_spans(record: StepRecord, engine: str, policy: str, resource: Resource) -> list[ReadableSpan]:
    """`engine.step` in a trace of its own, then a child per interval of the step."""
    context = child_context(None)
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


@dataclass(slots=True)
class Stage:
    """A stretch of a request's life; consecutive ones leave no gap."""

    name: StageName
    start: float
    end: float
    tokens: int = 0
    """Prefilled or generated."""
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

    def rode_in(self, step: int, seconds: float, context: SpanContext, *, keep: bool) -> None:
        """Remember a step for the links: the first, the last, the slowest, and with `keep` all."""
        self.first_step = self.first_step or (step, context)
        self.last_step = (step, context)
        if seconds > self.slowest_seconds:
            self.slowest_step, self.slowest_seconds = (step, context), seconds
        if keep and len(self.all_steps) < MAX_STEP_LINKS:
            self.all_steps.append((step, context))

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
