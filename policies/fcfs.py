"""First come, first served: the order of arrival, which a preempted request keeps."""

from __future__ import annotations

from policies.base import Schedulable
from policies.ranked import Rank, Ranked


class Fcfs(Ranked):
    """Arrival order; the latest admitted yields when KV runs out; nobody is displaced."""

    name = "fcfs"

    def rank(self, request: Schedulable) -> Rank:
        return (request.arrival,)
