"""Fair shares between tenants, counted in tokens: the Virtual Token Counter.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (arXiv 2401.00588). Each tenant
has a counter of the service it got; the waiting tenant with the smallest is next. Nothing is idle
while anyone waits, and while two tenants stay backlogged their weighted service differs by at most

    2 * max(prompt_weight * longest prompt, output_weight * KV tokens)

The paper's proof needs running requests to keep their KV. Preemption breaks that: KV that one request
of a tenant gives up, the next may fill. So a tenant that is ahead of the one whose turn it is by more
than the running batch could ever hold yields. Without a shortage of KV that never happens.
The bound holds where an output token weighs at least as much as a prompt token, and is divided by the
smallest tenant weight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.base import Policy, Schedulable
from policies.ranked import WaitingQueue

REMEMBERED_IDLE_TENANTS = 10_000


@dataclass(slots=True, eq=False)
class _Account:
    tenant: str
    weight: float
    counter: float = 0.0
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: set[str] = field(default_factory=set)
    listed: bool = False
    """An entry in the heap of waiting tenants is its own."""


class Fair(Policy):
    """The tenant served least is next; within a tenant, arrival order. The one served most yields first.

    `prompt_weight`, `output_weight`: cost of a token. `tenant_weights`: shares by tenant, 1 for others.
    """

    name = "fair"
    insists = True

    def __init__(
        self,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        if prompt_weight < 0 or output_weight <= 0:
            raise ValueError(
                "prompt_weight must be at least 0 and output_weight above 0, "
                f"got {prompt_weight} and {output_weight}"
            )
        self._weights = dict(tenant_weights or {})
        for tenant, weight in self._weights.items():
            if weight <= 0:
                raise ValueError(f"tenant_weights must be above 0, got {weight} for tenant {tenant!r}")
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._kv_tokens = math.inf
        self._accounts: dict[str, _Account] = {}
        self._heap: list[tuple[float, int, _Account]] = []
        """Waiting tenants by counter. Counters only grow, so an outdated key is a lower bound."""
        self._idle: list[tuple[float, str]] = []
        self._last = _Account(tenant="", weight=1.0)
        """The tenant whose request left the queue last."""
        self._waiting = 0

    def capacity(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens

    def enqueue(self, request: Schedulable, now: float) -> None:
        account = self._account(request.tenant)
        if not account.waiting:
            # A tenant that comes back has no claim on service it did not ask for: its counter is
            # lifted to the least among those who wait, or to the last one served if nobody does.
            floor = self._next() or self._last
            account.counter = max(account.counter, floor.counter)
            if not account.listed:
                account.listed = True
                heapq.heappush(self._heap, (account.counter, request.sequence, account))
        account.running.discard(request.id)
        account.waiting.push((request.arrival,), request)
        self._waiting += 1

    def withdraw(self, request: Schedulable) -> None:
        account = self._accounts[request.tenant]
        account.waiting.remove(request)
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + 16:
            for _, _, listed in self._heap:
                listed.listed = bool(listed.waiting)
            self._heap = [entry for entry in self._heap if entry[2].listed]
            heapq.heapify(self._heap)
        self._forget_if_idle(account)

    def peek(self, now: float) -> Schedulable | None:
        account = self._next()
        return account.waiting.head() if account else None

    def admit(self, request: Schedulable, now: float) -> None:
        account = self._accounts[request.tenant]
        account.waiting.remove(request)
        account.running.add(request.id)
        self._last = account
        self._waiting -= 1

    def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
        account = self._account(request.tenant)
        cost = self._prompt_weight * prompt_tokens + self._output_weight * output_tokens
        account.counter += cost / account.weight

    def finish(self, request: Schedulable) -> None:
        account = self._accounts[request.tenant]
        account.running.discard(request.id)
        self._forget_if_idle(account)

    def order(self, running: Sequence[Schedulable], now: float) -> list[Schedulable]:
        # Counters move, so they cannot say who stays first until it is done: the oldest does.
        return [*running[:1], *sorted(running[1:], key=lambda r: self._accounts[r.tenant].counter)]

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Sequence[Schedulable]:
        behind = self._accounts[waiting.tenant].counter
        # Each running request may add one token before the next look at the counters.
        most = self._output_weight * (self._kv_tokens - len(running))
        ahead = [
            request
            for request in running
            if (account := self._accounts[request.tenant]).counter - behind > most / account.weight
        ]
        ahead.reverse()
        ahead.sort(key=lambda request: -self._accounts[request.tenant].counter)
        return ahead

    @property
    def waiting(self) -> int:
        return self._waiting

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant, self._weights.get(tenant, 1.0))
        return account

    def _next(self) -> _Account | None:
        """The waiting tenant with the smallest counter."""
        while self._heap:
            counter, tie, account = self._heap[0]
            if not account.waiting:
                account.listed = False
                heapq.heappop(self._heap)
            elif counter < account.counter:
                heapq.heapreplace(self._heap, (account.counter, tie, account))
            else:
                return account
        return None

    def _forget_if_idle(self, account: _Account) -> None:
        """Keep the counters of so many idle tenants, dropping first those a lift would replace first."""
        if account.waiting or account.running:
            return
        heapq.heappush(self._idle, (account.counter, account.tenant))
        if len(self._idle) > REMEMBERED_IDLE_TENANTS:
            counter, tenant = heapq.heappop(self._idle)
            least = self._accounts.get(tenant)
            if least and least.counter == counter and not (least.waiting or least.running):
                del self._accounts[tenant]
