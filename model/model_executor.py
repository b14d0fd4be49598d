"""The executor that computes: plans to rows, one ragged forward, sampling, and whose fault a failure is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from model import sampler
from model.batch import Batch, SlotModel
from model.executor import DeviceLostError, Executed, Move, Outcome, Sampled, Stage, Work
from model.sampler import InvalidLogits
from model.storage import SlotStorage

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ModelExecutor:
    """A model and the storage of its slots, as an Executor."""

    def __init__(self, model: SlotModel, storage: SlotStorage) -> None:
        self.model = model
        self.storage = storage

    @property
    def num_slots(self) -> int:
        return self.storage.num_slots

    @property
    def max_len(self) -> int:
        return self.storage.max_len

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def arrange(self, moves: Sequence[Move]) -> None:
        """See Executor."""
        for move in moves:
            if move.source is not None:
                self.storage.copy(move.source, move.slot, move.length)
            self.storage.forget(move.slot, move.length)

    def execute(self, works: Sequence[Work]) -> Executed:
        """See Executor. A forward that fails is repeated for each of its requests alone, where all but the
        culprit get the bits they would have got.
        """
        started = time.perf_counter()
        batch = batch_of(works)
        computed = _attempt(self._compute, works, batch)
        if isinstance(computed, Exception):
            failed: Stage = ("forward", time.perf_counter() - started)
            if len(works) == 1:
                alone = Outcome(error=str(computed), computed=False)
                return Executed([alone], [failed], forwards=0, failures=1)
            log.error("a forward of %d requests failed: %s", len(works), computed)
            return _joined(Executed([], [failed], 0, 0, 0, 1), [self.execute([work]) for work in works])
        outcomes, stages = computed
        return Executed(
            outcomes,
            stages,
            rows=len(batch) - sum([work.count for work in works if work.idle]),
            padded_rows=self.model.row_count(len(batch)),
            failures=int(all(outcome.error is not None for outcome in outcomes)),
        )

    def _compute(self, works: Sequence[Work], batch: Batch) -> tuple[list[Outcome], list[Stage]]:
        """What comes of each work, and what that took."""
        started = time.perf_counter()
        logits = self.model.forward(batch, self.storage)
        computed = time.perf_counter()
        outcomes = _outcomes(works, logits)
        return outcomes, [("forward", computed - started), ("sample", time.perf_counter() - computed)]


def _joined(first: Executed, rest: Sequence[Executed]) -> Executed:
    """Executions one after the other, as one."""
    for part in rest:
        before = sum(kind == "forward" for kind, _ in first.stages)
        for outcome in part.outcomes:
            outcome.forward += before
        first.outcomes += part.outcomes
        first.stages += part.stages
        first.forwards += part.forwards
        first.rows += part.rows
        first.padded_rows += part.padded_rows
        first.failures += part.failures
    return first


def batch_of(works: Sequence[Work]) -> Batch:
    """The rows of a forward. Those that are scored bring logits, and each sequence's last."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for work in works:
        end = work.start + work.count
        offset = len(tokens) - work.start
        logit_rows.extend([offset + position for position in work.scored])
        if end == len(work.sequence.tokens):
            logit_rows.append(offset + end - 1)
        tokens.extend(work.sequence.tokens[work.start : end])
        positions.extend(range(work.start, end))
        slots.extend([work.slot] * work.count)
    return Batch(*(np.array(column, dtype=np.int64) for column in (tokens, positions, slots, logit_rows)))


def _outcomes(works: Sequence[Work], logits: torch.Tensor) -> list[Outcome]:
    """A token for each work that is due one. What is wrong with one ends that one, and nobody else."""
    outcomes = [Outcome() for _ in works]
    due: list[int] = []
    rows: list[int] = []
    row = 0
    for index, (work, outcome) in enumerate(zip(works, outcomes, strict=True)):
        if work.scored:
            targets = work.sequence.tokens[work.scored.start + 1 : work.scored.stop + 1]
            top = work.sequence.params.prompt_logprobs or 0
            scores = _attempt(sampler.prompt_logprobs, logits[row : row + len(targets)], targets, top)
            if isinstance(scores, Exception):
                outcome.error = str(scores)
            else:
                outcome.scores = scores
            row += len(targets)
        if work.start + work.count == len(work.sequence.tokens):
            if work.samples and outcome.error is None:
                due.append(index)
                rows.append(row)
            row += 1
    chosen = logits if len(rows) == len(logits) else logits[rows]
    for index, sampled in zip(due, _sample_each(chosen, [works[index] for index in due]), strict=True):
        if isinstance(sampled, Exception):
            outcomes[index].error = str(sampled)
        else:
            outcomes[index].sampled = sampled
    return outcomes


def _sample_each(logits: torch.Tensor, works: Sequence[Work]) -> list[Sampled | Exception]:
    """Each work's token, or what is wrong with it alone. logits: [len(works), vocab]."""
    if not works:
        return []
    together = _attempt(sampler.sample, logits, [work.sequence for work in works])
    if not isinstance(together, Exception):
        return [*together]
    if len(works) == 1:
        return [together]
    return [token for i, work in enumerate(works) for token in _sample_each(logits[i : i + 1], [work])]


def _attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What the call returns or raises. Raises DeviceLostError, since no request is to blame then."""
    try:
        return call(*args, **kwargs)
    except torch.AcceleratorError as error:
        raise DeviceLostError(str(error)) from error
    except Exception as error:
        if not isinstance(error, InvalidLogits):
            log.exception("a forward or the sampling of it failed")
        # The frames would hold on to all of a failed forward's memory, which the next one may need.
        return error.with_traceback(None)
