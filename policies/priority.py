"""The most urgent first, and an urgent request need not wait for a slot."""

from __future__ import annotations

from collections.abc import Sequence

from policies.base import Schedulable
from policies.ranked import Rank, Ranked


class Priority(Ranked):
    """Lower `priority` is more urgent; arrival breaks ties. The least urgent yields first.

    A waiting request displaces a running one if and only if its priority is strictly more urgent, so
    equals never ping-pong, and who was displaced cannot displace back.

    `aging_seconds`: so many seconds since arrival are worth one level of priority, in the queue and
    against displacement. Levels of all requests rise at the same pace, so their order never changes:
    a request of priority p ranks ahead of every request of priority q < p that arrives more than
    (p - q) * aging_seconds after it. Nobody waits behind an endless stream. None: no aging.
    """

    name = "priority"

    def __init__(self, aging_seconds: float | None = None) -> None:
        super().__init__()
        if aging_seconds is not None and aging_seconds <= 0:
            raise ValueError(f"aging_seconds must be above 0, got {aging_seconds}")
        self._levels_per_second = 0.0 if aging_seconds is None else 1 / aging_seconds

    def rank(self, request: Schedulable) -> Rank:
        return (request.priority + request.arrival * self._levels_per_second, request.arrival)

    def order(self, running: Sequence[Schedulable], now: float) -> list[Schedulable]:
        return sorted(running, key=lambda request: (self.rank(request), request.sequence))

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Sequence[Schedulable]:
        if not any(request.priority > waiting.priority for request in running):
            return ()
        rank = self.rank(waiting)
        less_urgent = [r for r in running if r.priority > waiting.priority and self.rank(r) > rank]
        return self.order(less_urgent, now)[::-1]
