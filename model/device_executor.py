"""The executor of a device that has kernels of its own to wait for: it computes the next step ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.batch import Batch
from model.device import Runtime
from model.device_step import Ask, DeviceStep, Pass
from model.executor import Move, Outcome, Sampled, Sequenced, Stage, Work
from model.model_executor import ModelExecutor, batch_of
from model.sampler import InvalidLogits
from model.storage import SlotStorage
from model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that nobody has asked for yet."""

    launched: float
    part: Pass
    tokens: list[int]
    """What each ask's row computes."""


class DeviceExecutor(ModelExecutor):
    """A model on a device, as an Executor.

    When all that was asked for was one more token of each request, the same is launched for the token after,
    before anybody plans it: the device computes while the host hands out this step's tokens and plans the
    next. What is then asked for is most often this; where it is not, only time is lost. A row computed for
    nobody changes nobody's bits, and what it leaves in its slot is overwritten before it is read.
    """

    def __init__(self, model: Transformer, storage: SlotStorage, runtime: Runtime) -> None:
        super().__init__(model, storage)
        self.step = DeviceStep(model, storage, runtime)
        self._ahead: _Ahead | None = None

    def arrange(self, moves: Sequence[Move]) -> None:
        """See Executor."""
        super().arrange(moves)
        for move in moves:
            if move.source is not None:
                self.step.copy(move.source, move.slot, move.length)

    def _compute(self, works: Sequence[Work], batch: Batch) -> tuple[list[Outcome], list[Stage]]:
        started = time.perf_counter()
        outcomes = [Outcome() for _ in works]
        if self._ahead is not None:
            started = self._ahead.launched
        due = self._land(works, outcomes)
        if due:
            rest = [works[index] for index in due]
            batch = batch if len(due) == len(works) else batch_of(rest)
            asks = list(_asks(rest))
            parts = self.step.passes(batch, [ask for _, ask in asks])
            results = (result for part in parts for result in self._run(part))
            for (index, ask), result in zip(asks, results, strict=True):
                _receive(outcomes[due[index]], rest[index], ask, result)
        stages: list[Stage] = [("forward", time.perf_counter() - started)]
        self._launch_ahead(works, outcomes)
        return outcomes, stages

    def _run(self, part: Pass) -> list[Sampled | InvalidLogits]:
        self.step.launch(part)
        return self.step.collect(part)

    def _land(self, works: Sequence[Work], outcomes: list[Outcome]) -> list[int]:
        """Take over what was computed ahead. Returns the places of the works that it was not."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return list(range(len(works)))
        results = self.step.collect(ahead.part)
        computed = {
            ask.slot: (ask, token, result)
            for ask, token, result in zip(ahead.part.asks, ahead.tokens, results, strict=True)
        }
        due = []
        for place, work in enumerate(works):
            ask, token, result = computed.get(work.slot, (None, None, None))
            if (
                ask is not None
                and ask.sequence is work.sequence
                and (work.start + 1, work.count, work.samples) == (ask.length, 1, True)
                and work.sequence.tokens[work.start] == token
                and not work.scored
            ):
                assert result is not None
                _receive(outcomes[place], work, ask, result)
            else:
                due.append(place)
        return due

    def _launch_ahead(self, works: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
        asks: list[Ask] = []
        tokens: list[int] = []
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome.sampled is None or work.count > 1:
                return
            sequence, length = work.sequence, work.start + 2
            if length - sequence.prompt_len < sequence.params.max_tokens and length <= self.max_len:
                asks.append(_last(sequence, len(asks), work.slot, length))
                tokens.append(outcome.sampled.token)
        if not asks:
            return
        positions, slots = np.array([(ask.length - 1, ask.slot) for ask in asks], np.int64).T
        rows = np.arange(len(asks), dtype=np.int64)
        batch = Batch(np.array(tokens, np.int64), positions.copy(), slots.copy(), rows)
        parts = list(self.step.passes(batch, asks))
        if len(parts) == 1:
            self.step.launch(parts[0])
            self._ahead = _Ahead(time.perf_counter(), parts[0], tokens)


def _last(sequence: Sequenced, row: int, slot: int, length: int) -> Ask:
    """To draw the token after the first `length`."""
    return Ask(row, slot, length, sequence, top=sequence.params.logprobs)


def _asks(works: Sequence[Work]) -> list[tuple[int, Ask]]:
    """What is asked of the rows of `batch_of(works)`, with the place of the work that asks."""
    asks: list[tuple[int, Ask]] = []
    row = 0
    for place, work in enumerate(works):
        sequence, offset = work.sequence, row - work.start
        top = sequence.params.prompt_logprobs or 0
        for at in work.scored:
            target = sequence.tokens[at + 1]
            asks.append((place, Ask(offset + at, work.slot, at + 1, sequence, target, top)))
        row += work.count
        if work.samples:
            asks.append((place, _last(sequence, row - 1, work.slot, work.start + work.count)))
    return asks


def _receive(outcome: Outcome, work: Work, ask: Ask, result: Sampled | InvalidLogits) -> None:
    if isinstance(result, InvalidLogits):
        outcome.error, outcome.sampled = str(result), None
    elif ask.target is not None:
        outcome.scores = [*outcome.scores, result]
    elif outcome.error is None:
        outcome.sampled = result
