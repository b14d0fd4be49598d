"""What happened to each request of a workload, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.samples import percentiles
from bench.workload import Item, Workload


@dataclass(slots=True)
class Timeline:
    """One request. Times are seconds of the run's clock."""

    item: Item
    arrival: float
    """When it was due, whether or not anyone was ready to take it."""
    token_times: list[float] = field(default_factory=list)
    """When each output token left the engine, or reached the client."""
    output: list[int] = field(default_factory=list)
    """Token ids, where the side under test tells them."""
    text: str = ""
    """The completion, where the side under test sends text."""
    admitted: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def e2e(self) -> float:
        return self.token_times[-1] - self.arrival


@dataclass(slots=True)
class Timelines:
    """A workload that was driven to its end: one timeline per item, in the workload's order."""

    requests: list[Timeline]
    started: float
    ended: float

    @classmethod
    def of(cls, workload: Workload, started: float) -> Timelines:
        return cls([Timeline(item, started + item.arrival) for item in workload.items], started, started)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def tokens_per_s(self) -> float:
        return sum(len(t.token_times) for t in self.requests) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [f"{t.item.id}: {t.error}" for t in self.requests if t.error is not None]

    def summary(self) -> dict[str, Any]:
        """Throughput; TTFT and E2E from arrival; ITL over all gaps of all requests. Seconds."""
        return latencies(self.requests, self.seconds)


def latencies(timelines: Sequence[Timeline], seconds: float) -> dict[str, Any]:
    """See Timelines.summary; of some of a run's requests: one tenant, one priority."""
    done = [t for t in timelines if t.token_times and t.error is None]
    samples = {
        "ttft": [t.ttft for t in done],
        "itl": [gap for t in done for gap in t.itls],
        "e2e": [t.e2e for t in done],
    }
    return {
        "requests": len(timelines),
        "completed": len(done),
        "seconds": seconds,
        "tokens_per_s": sum(len(t.token_times) for t in timelines) / seconds,
        "requests_per_s": len(done) / seconds,
    } | {f"{name}_{key}": p for name, values in samples.items() for key, p in percentiles(values).items()}


COLUMNS = (
    "tokens/s: tokens_per_s | requests/s: requests_per_s | TTFT p50 (s): ttft_p50 | p95: ttft_p95 | "
    "p99: ttft_p99 | ITL p50 (s): itl_p50 | p95: itl_p95 | p99: itl_p99 | E2E p50 (s): e2e_p50 | p95: e2e_p95"
)
"""Of a table of such figures."""
