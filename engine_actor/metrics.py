"""An engine's figures, as Prometheus families.

Names and units follow https://prometheus.io/docs/practices/naming/. Every metric carries the label
`engine`; labels with a tenant know at most TENANT_LABELS of them, later ones are `other`.

Counted here and not in prometheus_client's own counters and histograms, which lock and look a series up for
every token: they take six times as long. Families, samples and exposition are prometheus_client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine_actor.records import Occupancy, Share, StepRecord
from engine_actor.request import Request

TENANT_LABELS = 32
OTHER_TENANTS = "other"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
"""Buckets for what a request waits for."""
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets for a step, a phase of it, and the gap between two tokens."""


class _Values:
    """A number per series; a series is named by its labels' values, in order."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = f"slotserve_{name}"
        self.text = text
        self.labels = ("engine", *labels)
        # A series that first shows up at 1 has no rate: one without labels starts at 0.
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def collect(self, engine: str) -> Metric:
        family = self.family(self.name, self.text, labels=self.labels)
        for series, value in self._values.items():
            family.add_metric([engine, *series], value)
        return family


class _Counter(_Values):
    family = CounterMetricFamily

    def inc(self, *series: str, by: float = 1) -> None:
        if by:
            self._values[series] = self._values.get(series, 0) + by

    def total(self, value: float) -> None:
        """Show what is counted elsewhere."""
        self._values[()] = value


class _Gauge(_Values):
    family = GaugeMetricFamily

    def set(self, value: float, *series: str) -> None:
        self._values[series] = value


class _Histogram:
    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self.name = f"slotserve_{name}"
        self.text = text
        self.labels = ("engine", *labels)
        self._bounds = bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        """Observations up to each bound and above the one before; the last: above all bounds."""
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *series: str) -> None:
        counts = self._counts.get(series)
        if counts is None:
            counts = self._counts[series] = [0] * (len(self._bounds) + 1)
            self._sums[series] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[series] += value

    def collect(self, engine: str) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for series, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([engine, *series], buckets, self._sums[series])
        return family


@dataclass(slots=True)
class _Life:
    """A request as far as the records have told it."""

    request: Request
    tenant: str
    """The metric label."""
    last_token: float | None
    admitted: bool = False
    computed: int = 0
    """Most tokens ever cached for it: those below are recomputed when prefilled again."""


class EngineMetrics:
    """Counts what it is told of. Not thread-safe."""

    def __init__(self, engine: str, info: Mapping[str, str]) -> None:
        self._engine = engine
        self._tenants: set[str] = set()
        self._lives: dict[str, _Life] = {}

        self.requests = _Counter("requests", "Requests ended.", "tenant", "finish_reason")
        self.aborts = _Counter("aborts", "Requests whose client went away or that were cancelled.", "tenant")
        self.prompt_tokens = _Counter("prompt_tokens", "Prompt tokens of admitted requests.", "tenant")
        self.output_tokens = _Counter("output_tokens", "Tokens generated.", "tenant")
        self.recomputed_tokens = _Counter("recomputed_tokens", "Tokens prefilled again after a preemption.")
        self.reused_tokens = _Counter("reused_tokens", "Tokens that requests found computed.")
        self.copied_tokens = _Counter("copied_tokens", "Those of them that were copied from another slot.")
        self.evicted_tokens = _Counter("evicted_tokens", "Tokens of warm slots that were forgotten.")
        self.preemptions = _Counter("preemptions", "Requests that had to give their slot back.", "reason")
        self.steps = _Counter("steps", "Engine steps.")
        self.step_errors = _Counter("step_errors", "Forwards that failed, or whose every request did.")
        self.spans_exported = _Counter("spans_exported", "Trace spans handed to the exporter.")
        self.spans_dropped = _Counter("spans_dropped", "Trace spans lost: queue full or collector dead.")
        self.records_dropped = _Counter("records_dropped", "Steps that telemetry was too slow to look at.")
        self.ttft = _Histogram(
            "time_to_first_token_seconds",
            "From HTTP arrival to the first token, queue included.",
            SECONDS,
            "tenant",
        )
        self.itl = _Histogram(
            "inter_token_latency_seconds", "Gap between two tokens of a request.", STEP_SECONDS, "tenant"
        )
        self.e2e = _Histogram("request_seconds", "From HTTP arrival to the last token.", SECONDS, "tenant")
        self.queue_time = _Histogram(
            "queue_seconds", "From submission to the first time in a slot.", SECONDS, "tenant"
        )
        self.step_time = _Histogram("step_seconds", "One engine step.", STEP_SECONDS)
        self.phase_time = _Histogram("step_phase_seconds", "One phase of a step.", STEP_SECONDS, "phase")
        self.waiting = _Gauge("requests_waiting", "Requests that wait for a slot.", "tenant")
        self.running = _Gauge("requests_running", "Requests that hold a slot.")
        self.free_slots = _Gauge("slots_free", "Slots nobody holds.")
        self.slots = _Gauge("slots", "Slots of the engine.")
        self.kv_tokens = _Gauge("kv_tokens", "Tokens whose keys and values requests hold.")
        self.warm_tokens = _Gauge("warm_tokens", "Tokens that free slots remember.")
        self.kv_budget = _Gauge("kv_budget_tokens", "Tokens that may be cached at once.")
        self.step_fixed = _Gauge("step_fixed_seconds", "Learned: what a step takes whatever is in it.")
        self.step_row = _Gauge("step_row_seconds", "Learned: what each row adds to a step.")
        self.step_cached = _Gauge("step_cached_token_seconds", "Learned: what each cached token adds.")
        self.info = _Gauge("engine_info", "Always 1; the labels say what runs here.", *info)
        self.info.set(1, *info.values())

    def tenant(self, name: str) -> str:
        """The label for a tenant: its name, or `other` once there are too many."""
        if name in self._tenants or len(self._tenants) < TENANT_LABELS:
            self._tenants.add(name)
            return name
        return OTHER_TENANTS

    def submitted(self, request: Request) -> None:
        """A request has reached the engine."""
        tenant = self.tenant(request.tenant)
        self._lives[request.id] = _Life(request, tenant, request.last_token)

    def stepped(self, record: StepRecord) -> None:
        """A step is over."""
        self.steps.inc()
        self.step_errors.inc(by=record.errors)
        self.step_time.observe(record.seconds)
        for phase, seconds in record.phases.items():
            self.phase_time.observe(seconds, phase)
        self.reused_tokens.inc(by=sum(record.reused.values()))
        self.copied_tokens.inc(by=record.copied)
        self.evicted_tokens.inc(by=record.evicted)
        for reason in record.preempted.values():
            self.preemptions.inc(reason)
        for request_id in record.admitted:
            if (life := self._lives.get(request_id)) is not None:
                self._admitted(life, record)
        # A token is out when its step is over: that is when its frame leaves.
        now = record.started + record.seconds
        for share in record.shares:
            if (life := self._lives.get(share.request_id)) is not None:
                self._served(life, share, now)

    def ended(self, request: Request, at: float) -> None:
        """A request has left the engine."""
        if (life := self._lives.pop(request.id, None)) is None:
            return
        reason = request.finish_reason or "error"
        self.requests.inc(life.tenant, reason)
        if reason == "abort":
            self.aborts.inc(life.tenant)
        else:
            self.e2e.observe(max(0.0, at - request.arrival), life.tenant)

    def gauge(self, occupancy: Occupancy | None, waiting: Mapping[str, int]) -> None:
        """Set what is a state and not an event; `waiting`: requests by tenant."""
        by_label = dict.fromkeys(self._tenants, 0)
        if len(self._tenants) == TENANT_LABELS:
            by_label[OTHER_TENANTS] = 0
        for name, count in waiting.items():
            label = self.tenant(name)
            by_label[label] = by_label.get(label, 0) + count
        for label, count in by_label.items():
            self.waiting.set(count, label)
        if occupancy is not None:
            self.running.set(occupancy.running)
            self.slots.set(occupancy.slots)
            self.free_slots.set(occupancy.free_slots)
            self.kv_tokens.set(occupancy.kv_tokens)
            self.warm_tokens.set(occupancy.warm_tokens)
            self.kv_budget.set(occupancy.kv_budget)
            for gauge, seconds in zip(
                (self.step_fixed, self.step_row, self.step_cached), occupancy.step_time, strict=True
            ):
                gauge.set(seconds)

    def families(self) -> list[Metric]:
        """Everything, ready to be pickled and merged with other engines' figures."""
        figures = (f for f in vars(self).values() if isinstance(f, _Values | _Histogram))
        return [figure.collect(self._engine) for figure in figures]

    def _admitted(self, life: _Life, record: StepRecord) -> None:
        if not life.admitted:
            life.admitted = True
            self.queue_time.observe(record.started - life.request.queued, life.tenant)
            if not life.request.resumed:
                self.prompt_tokens.inc(life.tenant, by=life.request.prompt_len)

    def _served(self, life: _Life, share: Share, now: float) -> None:
        if share.kind == "prefill":
            self.recomputed_tokens.inc(by=max(0, min(life.computed - share.start, share.tokens)))
        life.computed = max(life.computed, share.start + share.tokens)
        if share.sampled:
            self.output_tokens.inc(life.tenant)
            if life.last_token is not None:
                # Another machine's clock may be ahead of this one's.
                self.itl.observe(max(0.0, now - life.last_token), life.tenant)
            elif not life.request.resumed:
                self.ttft.observe(max(0.0, now - life.request.arrival), life.tenant)
            life.last_token = now


def exposition(sources: Iterable[Sequence[Metric]]) -> bytes:
    """Prometheus text of several processes' families: one family per name, all samples in it."""
    merged: dict[str, Metric] = {}
    for families in sources:
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += family.samples

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry)
