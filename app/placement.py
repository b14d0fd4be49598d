"""Which engine gets a request. Plain Python: the engine client asks, and so does a simulated fleet."""

from __future__ import annotations

import math
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


LOAD_FACTOR = 1.25
"""So much more than its share an engine may be given because it remembers (consistent hashing with bounded
loads: Mirrokni, Thorup and Zadimoghaddam, 2016)."""


def best(willing: Sequence[C], fingerprint: str | None, max_waiting: int, remembering: C | None = None) -> C:
    """The one `remembering` unless it has more than its share; else the engine with most free KV, then the
    shortest queue, then the first.

    If there is one, it computes like `fingerprint` and, as far as is known, its queue has room.
    """
    alike = [c for c in willing if c.fingerprint == fingerprint] or willing
    roomy = [c for c in alike if c.held < c.slots + max_waiting] or alike
    if remembering is not None and remembering in roomy:
        share = (sum(c.held for c in roomy) + 1) / len(roomy)
        if remembering.held < math.ceil(LOAD_FACTOR * share):
            return remembering
    return max(roomy, key=lambda c: (c.free_kv, -c.waiting))
