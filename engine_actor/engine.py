"""The step loop: admit, prefill, decode, retire. No torch, no Ray, no asyncio, no HTTP.

engine = Engine(executor, Fcfs())
engine.submit(request)
while engine.has_work():
    outputs, record = engine.step()
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

from engine_actor.prefixes import block_keys
from engine_actor.records import Interval, Occupancy, Share, StepRecord
from engine_actor.request import FinishReason, Output, Phase, PreemptReason, Request
from engine_actor.scheduler import Mode, Plan, Reuse, Scheduler
from engine_actor.slots import Slots
from model.executor import Executed, Executor, Outcome, Sampled, Work
from policies.base import Policy

log = logging.getLogger(__name__)

PREEMPTION_LOG_SECONDS = 1.0


class RequestRefusedError(ValueError):
    """The request can never run here; the message says why and gives both lengths."""


class Engine:
    """Continuous batching over slots. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        *,
        mode: Mode = "chunked",
        max_step_tokens: int | None = None,
        kv_budget: int | None = None,
        prefix_reuse: Reuse = "tenant",
        itl_target: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.slots = Slots(executor.num_slots, executor.max_len, reuse=prefix_reuse != "off")
        self.scheduler = Scheduler(
            self.slots,
            policy,
            mode=mode,
            max_step_tokens=max_step_tokens,
            kv_budget=kv_budget,
            prefix_reuse=prefix_reuse,
            itl_target=itl_target,
        )
        self.clock = clock
        self.steps = 0
        self.progressed = time.monotonic()
        """When a forward last ended: a step may hold many."""
        self._submitted = 0
        self._under_way: StepRecord | None = None
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
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.executor.vocab_size:
            raise RequestRefusedError(f"token ids go from 0 to {self.executor.vocab_size - 1} in this model")
        if request.max_tokens_total > limit:
            raise RequestRefusedError(
                f"prompt ({request.prompt_len} tokens) + max_tokens ({request.params.max_tokens}) is "
                f"{request.max_tokens_total}, but this engine can hold {limit} tokens for one request"
            )
        request.queued = self.clock()
        request.sequence = self._submitted
        self._submitted += 1
        if self.slots.reuse:
            block_keys(self.scheduler.namespace(request), request.tokens, request.block_keys)
        self.requests[request.id] = request
        self.scheduler.policy.enqueue(request, request.queued)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Drop a request wherever it is and free its slot now (if its policy does); False: it is not here."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            self.scheduler.policy.withdraw(request)
        self._close(request, reason)
        self.scheduler.retire()
        return True

    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def waiting(self) -> int:
        """Requests submitted and without a slot."""
        return self.scheduler.policy.waiting

    @property
    def running(self) -> int:
        """Requests that have a slot and are not done."""
        return len(self.scheduler.running)

    def occupancy(self) -> Occupancy:
        """How full it is now. Any thread may ask."""
        slots = self.slots
        return Occupancy(
            running=self.running,
            slots=slots.count,
            free_slots=slots.free,
            kv_tokens=slots.tokens,
            warm_tokens=slots.warm_tokens,
            kv_budget=self.scheduler.kv_budget,
            step_time=self.scheduler.step_time.coefficients,
        )

    def step(self) -> tuple[list[Output], StepRecord]:
        """Admit, prefill, decode one token for every running request, retire the finished."""
        record = self._under_way = StepRecord(number=self.steps, started=self.clock())
        outputs: list[Output] = []
        self.steps += 1

        with self._timed(record, "admit"):
            plan = self._admit(record)
        for works in plan.prefills:
            outputs += self._execute(works, record, "prefill")
        outputs += self._execute(plan.batch, record, "decode")
        with self._timed(record, "retire"):
            self.scheduler.retire()

        self._describe(record, outputs)
        self._under_way = None
        return outputs, record

    def unfinished(self) -> StepRecord | None:
        """The step that is under way or has raised, so far, as a failed one. Any thread may ask."""
        if (record := self._under_way) is None:
            return None
        phase = "decode" if record.shares else "admit"
        now = self.clock() - record.started
        intervals = [*record.intervals, Interval(phase, record.seconds, now - record.seconds)]
        return replace(record, intervals=intervals, errors=record.errors + 1)

    def _admit(self, record: StepRecord) -> Plan:
        evicted = self.slots.evicted
        plan = self.scheduler.plan(record.started)
        record.admitted = [request.id for request in plan.admitted]
        record.reused = {request.id: tokens for request, tokens in plan.reused.items()}
        record.copied = plan.copied
        record.preempted = {request.id: reason for request, reason in plan.preempted.items()}
        record.evicted = self.slots.evicted - evicted
        self._arrange()
        return plan

    def _arrange(self) -> None:
        if moves := self.slots.moves:
            self.slots.moves = []
            self.executor.arrange(moves)

    def _execute(
        self, works: list[Work], record: StepRecord, phase: Literal["prefill", "decode"]
    ) -> list[Output]:
        """One forward, then a token for each request that has caught up with its own tokens."""
        # An earlier piece of the same prompt may have failed.
        works = [work for work in works if work.idle or _request(work).phase is not Phase.FINISHED]
        if not works:
            return []
        before = sum(interval.phase in ("prefill", "decode") for interval in record.intervals)
        shares = {work.slot: _share(work, before) for work in works if not work.idle}
        record.shares += shares.values()
        offset = self.clock() - record.started
        executed = self.executor.execute(works)
        self.progressed = time.monotonic()
        if not executed.failures:
            self._learn(works, executed)
        for stage, seconds in executed.stages:
            record.intervals.append(Interval(phase if stage == "forward" else stage, offset, seconds))
            offset += seconds
        record.forwards += executed.forwards
        record.rows += executed.rows
        record.padded_rows += executed.padded_rows
        record.errors += executed.failures
        outputs = []
        for work, outcome in zip(works, executed.outcomes, strict=True):
            if not work.idle:
                shares[work.slot].sampled = outcome.sampled is not None
                shares[work.slot].forward += outcome.forward
                outputs += self._receive(work, outcome, record)
        return outputs

    def _learn(self, works: list[Work], executed: Executed) -> None:
        rows = cached = 0
        for work in works:
            rows += work.count
            cached += work.start + work.count
        self.scheduler.step_time.observe(rows, cached, sum([seconds for _, seconds in executed.stages]))

    def _receive(self, work: Work, outcome: Outcome, record: StepRecord) -> list[Output]:
        """What one work's outcome means for its request, and what to say of it."""
        request = _request(work)
        if outcome.computed:
            self.slots.extend(work.slot, request.tokens[work.start : work.start + work.count])
            request.computed += work.count
        request.prompt_scores += outcome.scores
        if outcome.error is not None:
            self._close(request, "error")
            message = f"the engine failed in step {record.number}: {outcome.error}"
            log.error("request %s ends: %s", request.id, message)
            return [Output(request.id, request.num_output, None, "error", message)]
        return [] if outcome.sampled is None else [self._push(request, outcome.sampled)]

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
        return Output(
            request.id, index, sampled, reason, None, scores, request.num_preemptions, request.cached_tokens
        )

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        request.finished = self.clock()
        del self.requests[request.id]

    @contextmanager
    def _timed(self, record: StepRecord, phase: str) -> Iterator[None]:
        began = self.clock()
        yield
        record.intervals.append(Interval(phase, began - record.started, self.clock() - began))

    def _describe(self, record: StepRecord, outputs: list[Output]) -> None:
        record.warm = self.slots.warm
        record.finished = [output.request_id for output in outputs if output.finish_reason]
        record.waiting = self.waiting
        record.running = self.running
        record.free_slots = self.slots.free
        record.kv_tokens = self.slots.tokens
        record.kv_budget = self.scheduler.kv_budget
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


def _request(work: Work) -> Request:
    """The sequence of a work that the scheduler planned."""
    return cast(Request, work.sequence)


def _share(work: Work, forward: int) -> Share:
    request = _request(work)
    return Share(
        request_id=request.id,
        tenant=request.tenant,
        slot=work.slot,
        kind="decode" if request.phase is Phase.DECODE else "prefill",
        start=work.start,
        tokens=work.count,
        forward=forward,
    )
