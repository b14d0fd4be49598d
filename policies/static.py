"""Static batching, the baseline: a batch fills, runs until its last request is done, then the next."""

from __future__ import annotations

from policies.fcfs import Fcfs


class Static(Fcfs):
    """Arrival order, one batch at a time. A finished request's row stays in the batch as padding: it is
    computed like any other, attention and logits included, as in any rectangular batch.

    A fair baseline: a batch takes whatever waits, up to the slots, without waiting to be full; its prompts
    are prefilled as one ragged batch, without padding; tokens stream as they come; the next batch starts in
    the step after the last request is done.
    """

    name = "static"
    gang = True
