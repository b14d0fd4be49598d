"""Static batching, the baseline: a batch fills, runs until its last request is done, then the next."""

from __future__ import annotations

from policies.base import Schedulable
from policies.fcfs import Fcfs


class Static(Fcfs):
    """Arrival order, one batch at a time. A finished request's row stays in the batch: it is computed like
    any other, attention and logits included, as in any rectangular batch.

    A fair baseline: a batch takes whatever waits, up to the slots, without waiting to be full; its prompts
    are prefilled as one ragged batch, without padding; tokens stream as they come; the next batch starts in
    the step after the last request is done.
    """

    name = "static"

    def __init__(self) -> None:
        super().__init__()
        self._batch: set[str] = set()
        self._filled = 0.0
        """When the batch was put together, all at once."""

    def peek(self, now: float) -> Schedulable | None:
        return None if self._batch and now != self._filled else super().peek(now)

    def admit(self, request: Schedulable, now: float) -> None:
        super().admit(request, now)
        self._batch.add(request.id)
        self._filled = now

    def enqueue(self, request: Schedulable, now: float) -> None:
        super().enqueue(request, now)
        self._batch.discard(request.id)

    def finish(self, request: Schedulable) -> None:
        self._batch.discard(request.id)

    def releases(self, unfinished: int) -> bool:
        return unfinished == 0
