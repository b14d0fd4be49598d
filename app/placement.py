"""Which engine gets a request. Plain Python: the engine client asks, and so does a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """An engine as the one who places knows it."""

    @property
    def fingerprint(self) -> str | None:
        """What its outputs depend on, besides the request; None: not known."""
        ...

    @property
    def slots(self) -> int: ...
    @property
    def held(self) -> int:
        """Requests that run or wait there, or are on their way, as far as is known."""
        ...

    @property
    def waiting(self) -> int: ...
    @property
    def free_kv(self) -> int:
        """KV budget less the tokens of everything that runs, waits or is on its way there."""
        ...


C = TypeVar("C", bound=Candidate)


def best(willing: Sequence[C], fingerprint: str | None, max_waiting: int) -> C:
    """The engine with most free KV, then the shortest queue, then the first.

    If there is one, it computes like `fingerprint` and, as far as is known, its queue has room.
    """
    alike = [c for c in willing if c.fingerprint == fingerprint] or willing
    roomy = [c for c in alike if c.held < c.slots + max_waiting] or alike
    return max(roomy, key=lambda c: (c.free_kv, -c.waiting))
