"""An executor that computes nothing and says how long it would have taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.executor import Executed, Move, Outcome, Sampled, Work


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: fixed + per_row * rows + per_cached_token * tokens that the rows attend to."""

    fixed: float = 0.0
    per_row: float = 0.0
    per_cached_token: float = 0.0

    def __call__(self, rows: int, cached: int) -> float:
        return self.fixed + self.per_row * rows + self.per_cached_token * cached


def _instantly(seconds: float) -> None:
    pass


class TimedExecutor:
    """Every token is `token`. A step takes what `step_time(rows, cached)` says, and `wait` lets it pass:
    `time.sleep`, a virtual clock's advance, or (default) nothing at all.
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        step_time: Callable[[int, int], float] | None = None,
        *,
        wait: Callable[[float], None] = _instantly,
        vocab_size: int = 50_000,
        token: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self.vocab_size = vocab_size
        self._step_time = step_time
        self._wait = wait
        self._sampled = Sampled(token)

    def execute(self, works: Sequence[Work]) -> Executed:
        """See Executor. The positions that a prompt is scored at are all certain."""
        rows = cached = 0
        outcomes = []
        for work in works:
            rows += work.count
            cached += work.start + work.count
            outcome = Outcome(self._sampled if work.samples else None)
            if work.scored:
                outcome.scores = [Sampled(work.sequence.tokens[at + 1], 0.0) for at in work.scored]
            outcomes.append(outcome)
        seconds = self._step_time(rows, cached) if self._step_time else 0.0
        self._wait(seconds)
        useful = rows - sum([work.count for work in works if work.idle])
        return Executed(outcomes, [("forward", seconds)], rows=useful, padded_rows=rows)

    def arrange(self, moves: Sequence[Move]) -> None:
        """See Executor: a copy takes no time."""
