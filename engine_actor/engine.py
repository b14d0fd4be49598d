"""The step loop: admit, prefill, decode, retire. No Ray, no asyncio, no HTTP.

engine = Engine(model, kv, Fcfs())
engine.submit(request)
while engine.has_work():
    outputs, record = engine.step()
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeVar

import numpy as np
import torch

from engine_actor.request import FinishReason, Output, Phase, PreemptReason, Request
from engine_actor.scheduler import Mode, Plan, Scheduler, Work
from model import sampler
from model.batch import Batch, SlotModel
from model.executor import Sampled
from model.sampler import InvalidLogits
from model.slot_kv import SlotKV
from policies.base import Policy

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PREEMPTION_LOG_SECONDS = 1.0


class RequestRefusedError(ValueError):
    """The request can never run here; the message says why and gives both lengths."""


@dataclass(slots=True)
class Span:
    """What one request did in one forward: `tokens` rows in `slot`, from position `start`."""

    request_id: str
    tenant: str
    slot: int
    kind: Literal["prefill", "decode"]
    start: int
    tokens: int
    sampled: bool = False
    """Whether a token came of it."""
    forward: int = 0
    """Which of the step's forwards: the position among its prefill and decode intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of a step: admit, prefill, decode, sample or retire."""

    phase: str
    offset: float
    """Seconds since the step started."""
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """One step as an observer sees it. Times are seconds; `started` is of the engine's clock."""

    number: int
    started: float
    intervals: list[Interval] = field(default_factory=list)
    """What the step did when, in order; mode `separate` has a prefill and a sample per prompt."""
    spans: list[Span] = field(default_factory=list)
    forwards: int = 0
    rows: int = 0
    """Rows that did a request's work, over all forwards."""
    padded_rows: int = 0
    """Rows computed, padding included."""
    admitted: list[str] = field(default_factory=list)
    preempted: dict[str, PreemptReason] = field(default_factory=dict)
    """Why each lost its slot, by id."""
    finished: list[str] = field(default_factory=list)
    waiting: int = 0
    running: int = 0
    free_slots: int = 0
    kv_tokens: int = 0
    kv_budget: int = 0
    errors: int = 0
    """Forwards that failed in this step, or whose every request did."""
    zero: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    """The monotonic clock when the step started: intervals count from it."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase, summed over its intervals."""
        totals: dict[str, float] = {}
        for interval in self.intervals:
            totals[interval.phase] = totals.get(interval.phase, 0.0) + interval.seconds
        return totals

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last interval."""
        return self.intervals[-1].offset + self.intervals[-1].seconds if self.intervals else 0.0


class Engine:
    """Continuous batching over slots. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(
        self,
        model: SlotModel,
        kv: SlotKV,
        policy: Policy,
        *,
        mode: Mode = "chunked",
        max_step_tokens: int | None = None,
        kv_budget: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self.kv = kv
        self.scheduler = Scheduler(
            kv, policy, mode=mode, max_step_tokens=max_step_tokens, kv_budget=kv_budget
        )
        self.clock = clock
        self.steps = 0
        self.progressed = time.monotonic()
        """When a forward last ended: a step may hold many."""
        self._submitted = 0
        self._unlogged: Counter[PreemptReason] = Counter()
        self._logged = -math.inf
        self.requests: dict[str, Request] = {}
        """Everything submitted and not finished, by id."""

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot. Raises RequestRefusedError if it could never run."""
        limit = self.scheduler.largest_request
        if request.id in self.requests:
            raise RequestRefusedError(f"a request with id {request.id!r} is already here")
        if not request.prompt or request.params.max_tokens < 1:
            raise RequestRefusedError(
                "a request needs at least one prompt token and max_tokens of at least 1"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.model.vocab_size:
            raise RequestRefusedError(f"token ids go from 0 to {self.model.vocab_size - 1} in this model")
        if request.max_tokens_total > limit:
            raise RequestRefusedError(
                f"prompt ({request.prompt_len} tokens) + max_tokens ({request.params.max_tokens}) is "
                f"{request.max_tokens_total}, but this engine can hold {limit} tokens for one request"
            )
        request.queued = self.clock()
        request.sequence = self._submitted
        self._submitted += 1
        self.requests[request.id] = request
        self.scheduler.policy.enqueue(request, request.queued)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Drop a request wherever it is and free its slot now; False when it is not here.

        Under a gang policy the slot stays with the batch until the whole of it is done.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self.scheduler.policy.withdraw(request)
            self._close(request, reason)
        else:
            self._close(request, reason)
            self.scheduler.retire_finished()
        return True

    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def waiting(self) -> int:
        """Requests submitted and without a slot."""
        return len(self.scheduler.policy)

    def step(self) -> tuple[list[Output], StepRecord]:
        """Admit, prefill, decode one token for every running request, retire the finished."""
        record = StepRecord(number=self.steps, started=self.clock())
        outputs: list[Output] = []
        self.steps += 1

        with _timed(record, "admit"):
            plan = self.scheduler.plan(record.started)
        for works in plan.prefills:
            self._compute(works, record, outputs, "prefill")
        if plan.decode:
            self._compute(plan.decode, record, outputs, "decode", padding=self.scheduler.held.values())
        with _timed(record, "retire"):
            record.finished = [request.id for request in self.scheduler.retire_finished()]

        self._describe(record, plan)
        return outputs, record

    def _compute(
        self,
        works: list[Work],
        record: StepRecord,
        outputs: list[Output],
        phase: Literal["prefill", "decode"],
        padding: Collection[int] = (),
    ) -> None:
        """One forward, then a token for each request that has caught up with its own tokens.

        A forward that fails is repeated for each of its requests alone, where all but the culprit get the
        bits they would have got. Raises torch.AcceleratorError: after it the device is of no use.
        """
        # An earlier piece of the same prompt may have failed.
        works = [work for work in works if work.request.phase is not Phase.FINISHED]
        if not works:
            return
        forward = sum(interval.phase in ("prefill", "decode") for interval in record.intervals)
        spans = [_span(work, forward) for work in works]
        with _timed(record, phase):
            batch, scored = self._batch(works, padding)
            logits = _attempt(self.model.forward, batch, self.kv)
        self.progressed = time.monotonic()
        if isinstance(logits, Exception):
            record.errors += 1
            if len(works) > 1:
                log.error("step %d: a forward of %d requests failed: %s", record.number, len(works), logits)
                for work in works:
                    self._compute([work], record, outputs, phase)
            else:
                record.spans += spans
                outputs.append(self._fail(works[0].request, record, logits))
            return
        for work in works:
            work.request.computed += work.count
            self.kv.lengths[work.request.slot] = work.request.computed
        record.spans += spans
        record.forwards += 1
        record.rows += len(batch) - len(padding)
        record.padded_rows += self.model.row_count(len(batch))
        with _timed(record, "sample"):
            self._sample(spans, works, scored, logits, record, outputs)
        record.errors += all(work.request.finish_reason == "error" for work in works)

    def _batch(self, works: list[Work], padding: Collection[int]) -> tuple[Batch, list[range]]:
        """The rows of a forward and, per work, the positions that score a prompt token.

        A row of padding does what a live one of that many tokens does, in the scratch slot. Its logits
        come last, and nobody samples them.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        scored: list[range] = []
        for work in works:
            request, start, end = work.request, work.request.computed, work.request.computed + work.count
            offset = len(tokens) - start
            scored.append(_scored_positions(request, end))
            logit_rows.extend(offset + position for position in scored[-1])
            if end == len(request.tokens):
                logit_rows.append(offset + end - 1)
            tokens.extend(request.tokens[start:end])
            positions.extend(range(start, end))
            slots.extend([request.slot] * work.count)
        logit_rows.extend(range(len(tokens), len(tokens) + len(padding)))
        tokens.extend([0] * len(padding))
        positions.extend(length - 1 for length in padding)
        slots.extend([self.kv.scratch] * len(padding))
        columns = (np.array(column, dtype=np.int64) for column in (tokens, positions, slots, logit_rows))
        return Batch(*columns), scored

    def _sample(
        self,
        spans: list[Span],
        works: list[Work],
        scored: list[range],
        logits: torch.Tensor,
        record: StepRecord,
        outputs: list[Output],
    ) -> None:
        """A token for each request that is due one. What is wrong with one ends that one, and nobody else."""
        sampling: list[tuple[Span, Request]] = []
        rows: list[int] = []
        row = 0
        for span, request, positions in zip(spans, (work.request for work in works), scored, strict=True):
            if positions:
                targets = request.prompt[positions.start + 1 : positions.stop + 1]
                top = request.params.prompt_logprobs or 0
                scores = _attempt(sampler.prompt_logprobs, logits[row : row + len(positions)], targets, top)
                if isinstance(scores, Exception):
                    outputs.append(self._fail(request, record, scores))
                else:
                    request.prompt_scores += scores
                row += len(positions)
            if request.computed == len(request.tokens):
                if request.phase is not Phase.FINISHED:
                    sampling.append((span, request))
                    rows.append(row)
                row += 1
        chosen = logits if len(rows) == len(logits) else logits[rows]
        tokens = _sample_each(chosen, [request for _, request in sampling])
        for (span, request), sampled in zip(sampling, tokens, strict=True):
            if isinstance(sampled, Exception):
                outputs.append(self._fail(request, record, sampled))
            else:
                span.sampled = True
                outputs.append(self._push(request, sampled))

    def _fail(self, request: Request, record: StepRecord, error: Exception) -> Output:
        self._close(request, "error")
        message = f"the engine failed in step {record.number}: {error}"
        log.error("request %s ends: %s", request.id, message)
        return Output(request.id, request.num_output, None, "error", message)

    def _push(self, request: Request, sampled: Sampled) -> Output:
        """Append a token; mark the request finished if it is the last one."""
        index = request.num_output
        request.tokens.append(sampled.token)
        self.scheduler.policy.charge(request, 0, 1)
        request.phase = Phase.DECODE
        scores: tuple[Sampled, ...] = ()
        if request.first_token is None:
            request.first_token = self.clock()
            scores = tuple(request.prompt_scores)
        reason = request.stop_reason()
        if reason is not None:
            self._close(request, reason)
        return Output(request.id, index, sampled, reason, None, scores, request.num_preemptions)

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        request.finished = self.clock()
        del self.requests[request.id]

    def _describe(self, record: StepRecord, plan: Plan) -> None:
        scheduler = self.scheduler
        record.admitted = [request.id for request in plan.admitted]
        record.preempted = {request.id: reason for request, reason in plan.preempted.items()}
        record.waiting = len(scheduler.policy)
        record.running = len(scheduler.running)
        record.free_slots = self.kv.free_slots
        record.kv_tokens = self.kv.tokens
        record.kv_budget = scheduler.kv_budget
        self._log_preemptions(record)

    def _log_preemptions(self, record: StepRecord) -> None:
        """Say how many were preempted and why, once in PREEMPTION_LOG_SECONDS at most."""
        self._unlogged.update(record.preempted.values())
        due = record.started - self._logged >= PREEMPTION_LOG_SECONDS
        if self._unlogged and (due or not self.has_work()):
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._unlogged.items()))
            log.info(
                "preempted %d requests since the last such line (%s); %d running, %d waiting, "
                "%d of %d KV tokens used",
                self._unlogged.total(),
                reasons,
                record.running,
                record.waiting,
                record.kv_tokens,
                record.kv_budget,
            )
            self._unlogged.clear()
            self._logged = record.started


def _scored_positions(request: Request, end: int) -> range:
    """Positions up to `end` whose logits score the next prompt token, if that is still wanted."""
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(request.computed, len(request.prompt_scores))
    return range(first, max(first, min(end, request.prompt_len - 1)))


def _span(work: Work, forward: int) -> Span:
    request = work.request
    return Span(
        request_id=request.id,
        tenant=request.tenant,
        slot=request.slot,
        kind="decode" if request.phase is Phase.DECODE else "prefill",
        start=request.computed,
        tokens=work.count,
        forward=forward,
    )


def _sample_each(logits: torch.Tensor, requests: list[Request]) -> list[Sampled | Exception]:
    """Each request's token, or what is wrong with it alone. logits: [len(requests), vocab]."""
    if not requests:
        return []
    together = _attempt(sampler.sample, logits, requests)
    if not isinstance(together, Exception):
        return [*together]
    if len(requests) == 1:
        return [together]
    return [
        token for i, request in enumerate(requests) for token in _sample_each(logits[i : i + 1], [request])
    ]


def _attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What the call returns or raises. Raises torch.AcceleratorError, since no request is to blame."""
    try:
        return call(*args, **kwargs)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if not isinstance(error, InvalidLogits):
            log.exception("a forward or the sampling of it failed")
        # The frames would hold on to all of a failed forward's memory, which the next one may need.
        return error.with_traceback(None)


@contextmanager
def _timed(record: StepRecord, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        ended = time.perf_counter()
        record.intervals.append(Interval(phase, started - record.zero, ended - started))
