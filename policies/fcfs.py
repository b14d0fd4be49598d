"""First come, first served: the order of arrival, which a preempted request keeps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from policies.base import Schedulable


class Fcfs:
    """Arrival order; the latest arrival yields when KV runs out; nobody is displaced."""

    name = "fcfs"
    gang = False

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Schedulable]] = []
        self._waiting: set[str] = set()

    def enqueue(self, request: Schedulable, now: float) -> None:
        heapq.heappush(self._heap, (request.arrival, request.id, request))
        self._waiting.add(request.id)

    def withdraw(self, request: Schedulable) -> None:
        self._waiting.discard(request.id)

    def peek(self, now: float) -> Schedulable | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def admit(self, request: Schedulable, now: float) -> None:
        heapq.heappop(self._heap)
        self._waiting.discard(request.id)

    def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def victim(self, running: Sequence[Schedulable], now: float) -> Schedulable:
        return max(running, key=lambda request: (request.arrival, request.id))

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Schedulable | None:
        return None

    def __len__(self) -> int:
        return len(self._waiting)
