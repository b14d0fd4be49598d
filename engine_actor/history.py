"""The last steps of an engine, encoded: what live pages draw and traces are built from."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from engine_actor.clock import wall
from engine_actor.records import StepRecord
from engine_actor.request import Request
from engine_actor.step_wire import encode_step, page_message

HISTORY_SECONDS = 600
"""How far back steps are kept, and the most that can be asked for."""
HISTORY_BYTES = 64 << 20
"""Encoded steps kept at most: ten minutes at 60 a second with 16 slots, less with more."""
NEWS_STEPS = 128
"""Steps one message to live pages holds at most: they are asked for a few times a second."""


class StepHistory:
    """A ring of encoded steps, and who waits. One thread tells it; any thread may ask."""

    def __init__(
        self, engine: str, *, max_bytes: int = HISTORY_BYTES, max_seconds: float = HISTORY_SECONDS
    ) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._tenants: dict[str, str] = {}
        """Of every request that is here, by id."""
        self._in_queue: set[str] = set()
        self._waiting: dict[str, int] = {}
        self._arrived: list[list[Any]] = []
        self._ended: list[list[Any]] = []
        self._ring: deque[tuple[int, float, bytes]] = deque()
        self._ring_bytes = 0
        self._lock = threading.Lock()

    def submitted(self, request: Request) -> None:
        """A request has reached the engine."""
        self._tenants[request.id] = request.tenant
        self._waits(request.id)
        max_tokens = request.params.max_tokens
        self._arrived.append(
            [request.id, request.tenant, wall(request.arrival), request.prompt_len, max_tokens]
        )

    def stepped(self, record: StepRecord) -> None:
        """A step is over."""
        for request_id in record.preempted:
            self._waits(request_id)
        for request_id in record.admitted:
            self._leaves(request_id)
        for share in record.shares:
            # The record of its admission may have been dropped.
            if share.request_id in self._in_queue:
                self._leaves(share.request_id)
        extra = {"queue": self._waiting, "arrived": self._arrived, "ended": self._ended}
        line = encode_step(record, extra)
        self._arrived, self._ended = [], []
        horizon = record.started - self._max_seconds
        with self._lock:
            self._ring.append((record.number, record.started, line))
            self._ring_bytes += len(line)
            while len(self._ring) > 1 and (self._ring[0][1] < horizon or self._ring_bytes > self._max_bytes):
                self._ring_bytes -= len(self._ring.popleft()[2])

    def ended(self, request: Request, at: float) -> None:
        """A request has left the engine."""
        self._leaves(request.id)
        if self._tenants.pop(request.id, None) is not None:
            self._ended.append([request.id, request.finish_reason or "error", wall(at)])

    def waiting(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        return self._waiting.copy()

    def steps_since(self, number: int, limit: int) -> tuple[int, list[bytes]]:
        """The newest step's number, and the encoded steps after step `number`: the newest `limit` of them,
        the oldest first."""
        found: list[bytes] = []
        with self._lock:
            newest = self._ring[-1][0] if self._ring else -1
            for step, _, line in reversed(self._ring):
                if step <= number or len(found) == limit:
                    break
                found.append(line)
        return newest, found[::-1]

    def steps_of_last(self, seconds: float) -> list[bytes]:
        """Encoded steps that started within the last `seconds` up to now, the oldest first."""
        since = time.monotonic() - seconds
        with self._lock:
            return [line for _, started, line in self._ring if started >= since]

    def news(self, since: int) -> tuple[int, bytes]:
        """The newest step's number, and a message for live pages with the steps after `since`.

        Of very many steps the newest NEWS_STEPS; of -1 in any case, as for a page that has just come.
        """
        newest, steps = self.steps_since(since, NEWS_STEPS)
        return newest, page_message(self._engine, steps, wall(time.monotonic()), self.waiting())

    def _waits(self, request_id: str) -> None:
        tenant = self._tenants.get(request_id)
        if tenant is not None and request_id not in self._in_queue:
            self._in_queue.add(request_id)
            self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def _leaves(self, request_id: str) -> None:
        if request_id in self._in_queue:
            self._in_queue.remove(request_id)
            tenant = self._tenants[request_id]
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
