"""Requests that were not served, by status and reason: counted here, added up over all replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from app.engine_port import DirectoryLostError

Counts = Mapping[tuple[int, str], int]
"""By status and reason."""
REPORT_SECONDS = 1.0
"""How long a replica keeps what it has counted for itself."""


class Tally(Protocol):
    """Where the counts of all replicas meet."""

    async def add_refusals(self, counts: Counts) -> Counts:
        """Add to the totals, and return them. Raises DirectoryLostError."""
        ...


class Refusals:
    """What one replica has refused. Used on one event loop."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._new: Counter[tuple[int, str]] = Counter()
        self._totals: Counts = {}
        self._report: asyncio.Task[None] | None = None

    def count(self, status: int, reason: str) -> None:
        """One more. `reason` is one of a few: it becomes a label."""
        self._new[status, reason] += 1
        if self._report is None or self._report.done():
            self._report = asyncio.create_task(self._report_soon())

    async def families(self) -> list[Metric]:
        """The totals for /metrics; while the tally is away, the last known ones and this replica's own."""
        await self._send()
        totals = Counter(self._totals) + self._new
        family = CounterMetricFamily(
            "slotserve_http_refusals", "Requests refused or failed.", labels=("status", "reason")
        )
        for (status, reason), count in sorted(totals.items()):
            family.add_metric((str(status), reason), count)
        return [family]

    async def _report_soon(self) -> None:
        await asyncio.sleep(REPORT_SECONDS)
        await self._send()

    async def _send(self) -> None:
        counts, self._new = self._new, Counter()
        try:
            self._totals = await self._tally.add_refusals(counts)
        except DirectoryLostError:
            self._new += counts
