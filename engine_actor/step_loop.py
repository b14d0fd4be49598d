"""The step loop's thread: an inbox before each step, one delivery of frames after it.

The thread owns the engine and runs nothing else; other threads only leave messages and read the status.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_actor.engine import Engine, RequestRefusedError
from engine_actor.messages import EngineInfo, EngineStatus, Frame
from engine_actor.records import Occupancy, StepRecord
from engine_actor.request import FinishReason, Output, Request

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Consecutive failing steps after which the state of the device is not to be trusted."""


class Observer(Protocol):
    """Watches the loop from the step thread, so it must be quick; what it raises is logged."""

    def on_start(self, occupancy: Callable[[], Occupancy]) -> None:
        """The engine is built; any thread may ask how full it is, at any time."""
        ...

    def on_submit(self, request: Request) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_end(self, request: Request) -> None:
        """The request has left the engine: finished, aborted, failed or refused."""
        ...


Build = Callable[[], tuple[Engine, EngineInfo]]
Deliver = Callable[[dict[str, Frame], EngineStatus], None]
"""Takes each attachment's share of a step, and the status for those that have none."""


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    attachment: str


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Release:
    attachment: str


class StepLoop(threading.Thread):
    """Builds an engine and steps it while there is work; sleeps on a condition while there is none.

    The other threads only `submit`, `abort`, `release` and read `status`. `deliver` is called once
    a step, on this thread. `fail` is called, last, with the error that made the loop give up.
    """

    def __init__(
        self,
        build: Build,
        *,
        max_waiting: int,
        ready: Callable[[EngineInfo], None],
        deliver: Deliver,
        fail: Callable[[BaseException], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(name="step-loop", daemon=True)
        self._build = build
        self._max_waiting = max_waiting
        self._ready = ready
        self._deliver = deliver
        self._fail = fail
        self._observers = observers
        self._wake = threading.Condition()
        self._inbox: list[_Submit | _Abort | _Release] = []
        self._accepted = 0
        """Requests in the inbox or in the engine; guarded by `_wake`."""
        self._roused = time.monotonic()
        """When work came after there had been none."""
        self._engine: Engine | None = None
        self._capacity = 0
        self._stopping = False
        # From here on: the step thread's own.
        self._open: dict[str, _Submit] = {}
        self._open_tokens = 0
        self._status = EngineStatus()

    def submit(self, attachment: str, requests: Sequence[Request], *, again: bool = False) -> str | None:
        """Put requests into the inbox, all or none; the answer says why none.

        With `again` they were accepted once already, by an engine that died, and are always taken.
        """
        with self._wake:
            if not again and self._accepted + len(requests) > self._capacity:
                return f"{self._accepted} requests run or wait here, and {self._capacity} is the limit"
            if self._accepted == 0:
                self._roused = time.monotonic()
            self._accepted += len(requests)
            self._inbox += [_Submit(request, attachment) for request in requests]
            self._wake.notify()
        return None

    def abort(self, request_ids: Sequence[str], reason: FinishReason = "abort") -> None:
        """Drop requests before the next step; unknown ids are ignored. `reason` goes on record."""
        with self._wake:
            self._inbox += [_Abort(request_id, reason) for request_id in request_ids]
            self._wake.notify()

    def release(self, attachment: str) -> None:
        """Drop everything an attachment has submitted before the next step."""
        with self._wake:
            self._inbox.append(_Release(attachment))
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the step it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def status(self) -> EngineStatus:
        """The status after the last step, and how long ago the last forward was if work waits."""
        status, stalled = self._status, 0.0
        if self._accepted and self._engine is not None:
            stalled = time.monotonic() - max(self._roused, self._engine.progressed)
        return EngineStatus(status.steps, status.waiting, status.running, status.free_kv, stalled)

    def unfinished(self) -> StepRecord | None:
        """See Engine.unfinished."""
        return None if self._engine is None else self._engine.unfinished()

    def run(self) -> None:
        """Build, then step until stopped."""
        try:
            engine, info = self._build()
            with self._wake:
                self._engine = engine
                self._capacity = engine.slots.count + self._max_waiting
            self._update_status(engine)
            for observer in self._observers:
                self._guarded(observer.on_start, engine.occupancy)
            self._ready(info)
            self._run(engine)
        except BaseException as error:
            self._fail(error)

    def _run(self, engine: Engine) -> None:
        failed = 0
        while self._take_in(engine):
            if not engine.has_work():
                self._publish(engine, [])
                continue
            outputs, record = engine.step()
            for observer in self._observers:
                self._guarded(observer.on_step, record)
            self._publish(engine, outputs)
            # One request that fails every time is no reason to doubt the device.
            useless = record.errors and not any(share.sampled for share in record.shares)
            failed = failed + 1 if useless else 0
            if failed >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{failed} steps in a row have failed")

    def _take_in(self, engine: Engine) -> bool:
        """Move the inbox into the engine, waiting while there is nothing to do; False: stop."""
        with self._wake:
            while not (self._inbox or engine.has_work() or self._stopping):
                self._wake.wait()
            if self._stopping:
                return False
            inbox, self._inbox = self._inbox, []
        for message in inbox:
            match message:
                case _Submit():
                    self._admit(engine, message)
                case _Abort(request_id, reason):
                    self._drop(engine, request_id, reason)
                case _Release(attachment):
                    for request_id in [
                        i for i, entry in self._open.items() if entry.attachment == attachment
                    ]:
                        self._drop(engine, request_id, "abort")
        return True

    def _admit(self, engine: Engine, entry: _Submit) -> None:
        request = entry.request
        if request.id in self._open:
            self._refuse_double(entry)
            return
        self._open[request.id] = entry
        self._open_tokens += len(request.tokens)
        for observer in self._observers:
            self._guarded(observer.on_submit, request)
        try:
            engine.submit(request)
        except RequestRefusedError as error:
            self._publish(engine, [Output(request.id, 0, None, "error", str(error))])

    def _refuse_double(self, entry: _Submit) -> None:
        """The id stays with whoever had it first: nothing is recorded under it."""
        with self._wake:
            self._accepted -= 1
        message = f"a request with id {entry.request.id!r} is already here"
        refusal = Output(entry.request.id, 0, None, "error", message)
        self._deliver({entry.attachment: Frame(self._status, (refusal,))}, self._status)

    def _drop(self, engine: Engine, request_id: str, reason: FinishReason) -> None:
        if engine.abort(request_id, reason):
            self._close(request_id)

    def _publish(self, engine: Engine, outputs: Sequence[Output]) -> None:
        by_attachment: dict[str, list[Output]] = {}
        for output in outputs:
            entry = self._open[output.request_id]
            by_attachment.setdefault(entry.attachment, []).append(output)
            if output.sampled is not None:
                self._open_tokens += 1
            if output.finish_reason is not None:
                self._close(output.request_id)
        status = self._update_status(engine)
        frames = {attachment: Frame(status, tuple(mine)) for attachment, mine in by_attachment.items()}
        self._deliver(frames, status)

    def _close(self, request_id: str) -> None:
        request = self._open.pop(request_id).request
        self._open_tokens -= len(request.tokens)
        with self._wake:
            self._accepted -= 1
        for observer in self._observers:
            self._guarded(observer.on_end, request)

    def _update_status(self, engine: Engine) -> EngineStatus:
        self._status = EngineStatus(
            steps=engine.steps,
            waiting=engine.waiting,
            running=engine.running,
            free_kv=engine.scheduler.kv_budget - self._open_tokens,
        )
        return self._status

    def _guarded(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            log.exception("an observer failed; the loop goes on")
