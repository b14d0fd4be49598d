"""An engine's figures as Prometheus metrics, mirrored to Ray's so that its dashboard shows them too.

Names and units follow https://prometheus.io/docs/practices/naming/. Every metric carries the label
`engine`; labels with a tenant know at most TENANT_LABELS of them, later ones are `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine_actor.records import StepRecord

TENANT_LABELS = 32
OTHER_TENANTS = "other"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
"""Buckets for what a request waits for."""
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Buckets for a step, a phase of it, and the gap between two tokens."""


class Mirror(Protocol):
    """What `ray.util.metrics` offers: the second place every figure goes to."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class _Figure:
    """One metric of one engine, in both places."""

    def __init__(self, own: MetricWrapperBase, mirrored: Any, engine: str) -> None:  # noqa: ANN401 - untyped Ray
        self._own = own
        self._mirrored = mirrored
        self._engine = engine
        # Looking a series up by its labels costs more than counting in it.
        self._series: dict[tuple[str, ...], tuple[Any, dict[str, str]]] = {}

    def inc(self, value: float = 1, **labels: str) -> None:
        if value:
            series, tags = self._find(labels)
            series.inc(value)
            if self._mirrored is not None:
                self._mirrored.inc(value, tags)

    def set(self, value: float, **labels: str) -> None:
        series, tags = self._find(labels)
        series.set(value)
        if self._mirrored is not None:
            self._mirrored.set(value, tags)

    def observe(self, value: float, **labels: str) -> None:
        series, tags = self._find(labels)
        series.observe(value)
        if self._mirrored is not None:
            self._mirrored.observe(value, tags)

    def _find(self, labels: dict[str, str]) -> tuple[Any, dict[str, str]]:
        key = tuple(labels.values())
        if key not in self._series:
            tags = {"engine": self._engine, **labels}
            self._series[key] = (self._own.labels(**tags), tags)
        return self._series[key]


class EngineMetrics:
    """Not thread-safe but for `families`: one thread records."""

    def __init__(
        self, engine: str, info: Mapping[str, str], mirror: Mirror | None = None, *, slots: int = 0
    ) -> None:
        self._registry = CollectorRegistry()
        self._engine = engine
        self._mirror = mirror
        self._tenants: set[str] = set()

        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.requests = counter("requests", "Requests ended.", "tenant", "finish_reason")
        self.aborts = counter("aborts", "Requests whose client went away or that were cancelled.", "tenant")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.", "tenant")
        self.output_tokens = counter("output_tokens", "Tokens generated.", "tenant")
        self.recomputed_tokens = counter("recomputed_tokens", "Tokens prefilled again after a preemption.")
        self.preemptions = counter("preemptions", "Requests that had to give their slot back.", "reason")
        self.steps = counter("steps", "Engine steps.")
        self.step_errors = counter("step_errors", "Forwards that failed, or whose every request did.")
        self.spans_exported = counter("spans_exported", "Trace spans handed to the exporter.")
        self.spans_dropped = counter("spans_dropped", "Trace spans lost: queue full or collector dead.")
        self.records_dropped = counter("records_dropped", "Steps that telemetry was too slow to look at.")
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From HTTP arrival to the first token, queue included.",
            SECONDS,
            "tenant",
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Gap between two tokens of a request.", STEP_SECONDS, "tenant"
        )
        self.e2e = histogram("request_seconds", "From HTTP arrival to the last token.", SECONDS, "tenant")
        self.queue_time = histogram(
            "queue_seconds", "From submission to the first time in a slot.", SECONDS, "tenant"
        )
        self.step_time = histogram("step_seconds", "One engine step.", STEP_SECONDS)
        self.phase_time = histogram("step_phase_seconds", "One phase of a step.", STEP_SECONDS, "phase")
        self.waiting = gauge("requests_waiting", "Requests that wait for a slot.", "tenant")
        self.running = gauge("requests_running", "Requests that hold a slot.")
        self.free_slots = gauge("slots_free", "Slots nobody holds.")
        self.slots = gauge("slots", "Slots of the engine.")
        self.kv_tokens = gauge("kv_tokens", "Tokens whose keys and values are cached.")
        self.kv_budget = gauge("kv_budget_tokens", "Tokens that may be cached at once.")
        self.info = gauge("engine_info", "Always 1; the labels say what runs here.", *info)
        self._labels = dict(info)
        self._slots = slots
        self.gauge_all(None, {})

    def tenant(self, name: str) -> str:
        """The label for a tenant: its name, or `other` once there are too many."""
        if name in self._tenants or len(self._tenants) < TENANT_LABELS:
            self._tenants.add(name)
            return name
        return OTHER_TENANTS

    def stepped(self, record: StepRecord) -> None:
        """Count a step and what it took."""
        self.steps.inc()
        self.step_errors.inc(record.errors)
        self.step_time.observe(record.seconds)
        for phase, seconds in record.phases.items():
            self.phase_time.observe(seconds, phase=phase)

    def gauge_all(self, record: StepRecord | None, waiting: Mapping[str, int]) -> None:
        """Set what is a state and not an event. Ray forgets a gauge that is not set again for long."""
        self.info.set(1, **self._labels)
        by_label = dict.fromkeys(self._tenants, 0)
        if len(self._tenants) == TENANT_LABELS:
            by_label[OTHER_TENANTS] = 0
        for name, count in waiting.items():
            label = self.tenant(name)
            by_label[label] = by_label.get(label, 0) + count
        for label, count in by_label.items():
            self.waiting.set(count, tenant=label)
        self.slots.set(self._slots)
        self.running.set(record.running if record else 0)
        self.free_slots.set(record.free_slots if record else self._slots)
        self.kv_tokens.set(record.kv_tokens if record else 0)
        if record:
            self.kv_budget.set(record.kv_budget)

    def families(self) -> list[Metric]:
        """Everything, ready to be pickled and merged with other engines' figures."""
        return list(self._registry.collect())

    def _counter(self, name: str, text: str, *labels: str) -> _Figure:
        full, keys = f"slotserve_{name}", ("engine", *labels)
        own = Counter(full, text, keys, registry=self._registry)
        mirrored = self._mirror and self._mirror.Counter(f"{full}_total", description=text, tag_keys=keys)
        return _Figure(own, mirrored, self._engine)

    def _gauge(self, name: str, text: str, *labels: str) -> _Figure:
        full, keys = f"slotserve_{name}", ("engine", *labels)
        own = Gauge(full, text, keys, registry=self._registry)
        mirrored = self._mirror and self._mirror.Gauge(full, description=text, tag_keys=keys)
        return _Figure(own, mirrored, self._engine)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> _Figure:
        full, keys = f"slotserve_{name}", ("engine", *labels)
        own = Histogram(full, text, keys, buckets=buckets, registry=self._registry)
        mirrored = self._mirror and self._mirror.Histogram(
            full, description=text, boundaries=list(buckets), tag_keys=keys
        )
        return _Figure(own, mirrored, self._engine)


def exposition(sources: Iterable[Sequence[Metric]]) -> bytes:
    """Prometheus text of several processes' families: one family per name, all samples in it."""
    merged: dict[str, Metric] = {}
    for families in sources:
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            # When a series began is of no use here and doubles the page.
            into.samples += [sample for sample in family.samples if not sample.name.endswith("_created")]

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry)
