"""One queue in order of a fixed rank: all that most policies need."""

from __future__ import annotations

import heapq
from abc import abstractmethod

from policies.base import Policy, Schedulable

Rank = tuple[float, ...]


class WaitingQueue:
    """Requests by rank, the smallest first, ties in order of submission.

    Every operation is O(log waiting), amortised: a removed request leaves its heap entry behind, and
    the heap is rebuilt before such leftovers outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Schedulable]] = []
        self._waiting: dict[str, int] = {}
        """Sequence number by id: an id may come back under a new number."""

    def push(self, rank: Rank, request: Schedulable) -> None:
        heapq.heappush(self._heap, (rank, request.sequence, request))
        self._waiting[request.id] = request.sequence

    def head(self) -> Schedulable | None:
        while self._heap and not self._alive(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Schedulable) -> None:
        del self._waiting[request.id]
        if self._heap[0][2] is request:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def _alive(self, request: Schedulable) -> bool:
        return self._waiting.get(request.id) == request.sequence


class Ranked(Policy):
    """Admission by `rank`, the smallest first; a preempted request keeps its rank."""

    def __init__(self) -> None:
        self._queue = WaitingQueue()

    @abstractmethod
    def rank(self, request: Schedulable) -> Rank:
        """Sort key of a request; it must not change while the request lives."""

    def enqueue(self, request: Schedulable, now: float) -> None:
        self._queue.push(self.rank(request), request)

    def withdraw(self, request: Schedulable) -> None:
        self._queue.remove(request)

    def peek(self, now: float) -> Schedulable | None:
        return self._queue.head()

    def admit(self, request: Schedulable, now: float) -> None:
        self._queue.remove(request)

    @property
    def waiting(self) -> int:
        return len(self._queue)
