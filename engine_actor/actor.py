"""The Ray actor around the step loop: an inbox, the step thread, and one stream of frames a replica.

The step thread owns the engine and runs nothing else; the actor's asyncio loop talks to replicas.
They meet twice a step: the inbox is emptied before it, and its frames are handed over after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric

from engine_actor.engine import Engine, RequestRefusedError, StepRecord
from engine_actor.messages import LEASE_SECONDS, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Output, Request
from engine_actor.step_wire import pack_steps
from engine_actor.telemetry import Telemetry

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.25
"""How stale a replica's view of an engine that steps for others may become."""
FRAMES_PER_STREAM = 100_000
MAX_FAILED_STEPS = 3
"""Consecutive failing steps after which the state of the device is not to be trusted."""


class Observer(Protocol):
    """Watches the loop from the step thread, so it must be quick; what it raises is logged."""

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

    def run(self) -> None:
        """Build, then step until stopped."""
        try:
            engine, info = self._build()
            with self._wake:
                self._engine = engine
                self._capacity = engine.kv.num_slots + self._max_waiting
            self._update_status(engine)
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
            useless = record.errors and not any(span.sampled for span in record.spans)
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
        scheduler = engine.scheduler
        self._status = EngineStatus(
            steps=engine.steps,
            waiting=len(scheduler.policy),
            running=len(scheduler.running),
            free_kv=scheduler.kv_budget - self._open_tokens,
        )
        return self._status

    def _guarded(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            log.exception("an observer failed; the loop goes on")


class EngineActor:
    """One engine as a Ray actor. Replicas attach with `frames` and keep their lease with `renew`."""

    def __init__(
        self,
        name: str,
        build: Build,
        max_waiting: int,
        stall_seconds: float,
        telemetry: Callable[[], Telemetry],
    ) -> None:
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
        self._name = name
        self._stall_seconds = stall_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: asyncio.Future[EngineInfo] | None = None
        self._replicas: dict[str, _Attachment] = {}
        self._attachments = 0
        self._telemetry = telemetry()
        self._steps = StepLoop(
            build,
            max_waiting=max_waiting,
            ready=self._on_ready,
            deliver=self._on_frames,
            fail=self._on_failure,
            observers=[self._telemetry],
        )

    def __repr__(self) -> str:
        return self._name

    async def ready(self) -> EngineInfo:
        """Start the step loop if it has not been, and wait until it can serve.

        Raises what building the engine raised.
        """
        if self._info is None:
            self._loop = asyncio.get_running_loop()
            self._info = self._loop.create_future()
            self._steps.start()
            self._reaper = asyncio.create_task(self._reap())
        return await asyncio.shield(self._info)

    async def lifetime(self) -> None:
        """Never returns: the call fails when the actor dies, which is how its death is noticed."""
        await asyncio.Event().wait()

    async def ping(self) -> None:
        """Returns at once: a process that is stopped or stuck is noticed because it does not."""

    async def frames(self, replica: str) -> AsyncGenerator[Frame, None]:
        """Attach a replica: first the engine's status, then a frame whenever a step concerns it.

        A stream is long but not endless, since Ray remembers every item of one: call again for the
        next. A call that follows the end of a stream goes on where that ended, unless the lease ran
        out or the replica detached; then, as on the first call, the first frame says `attached`.
        """
        attached = self._replicas.get(replica)
        if attached is None or attached.reading:
            self._detach(replica)
            self._attachments += 1
            attached = self._replicas[replica] = _Attachment(f"{replica}#{self._attachments}")
            attached.frames.put_nowait(Frame(self._steps.status(), attached=True))
        attached.reading = True
        try:
            for _ in range(FRAMES_PER_STREAM):
                frame = await attached.frames.get()
                if frame is None:
                    return
                yield frame
            attached.reading = False
        finally:
            if attached.reading and self._replicas.get(replica) is attached:
                self._detach(replica)

    async def submit(self, replica: str, requests: Sequence[Request], again: bool = False) -> str | None:
        """Queue requests, all or none. None: accepted; else why the queue does not take them.

        Raises LookupError if the replica is not attached: nobody would read the outputs.
        """
        attached = self._replicas.get(replica)
        if attached is None:
            raise LookupError(f"replica {replica} is not attached")
        return self._steps.submit(attached.id, requests, again=again)

    async def abort(self, request_ids: Sequence[str], reason: FinishReason = "abort") -> None:
        """Drop requests; their slots are free before the next step (see Engine.abort).

        `stop`: the replica has found a stop string, and the request counts as one that finished.
        """
        self._steps.abort(request_ids, reason)

    async def renew(self, replica: str) -> EngineStatus:
        """Keep a replica's lease, and tell how busy the engine is."""
        if replica in self._replicas:
            self._replicas[replica].heard = time.monotonic()
        return self._steps.status()

    async def detach(self, replica: str) -> None:
        """End a replica's frames and drop its requests."""
        self._detach(replica)

    async def news(self, since: int) -> tuple[int, bytes]:
        """See Telemetry.news."""
        return self._telemetry.news(since)

    async def history(self, seconds: float) -> bytes:
        """The steps of the last `seconds`, encoded and packed by step_wire."""
        return await asyncio.to_thread(lambda: pack_steps(self._telemetry.steps_of_last(seconds)))

    async def figures(self) -> list[Metric]:
        """The engine's Prometheus families."""
        return await asyncio.to_thread(self._telemetry.figures)

    def _detach(self, replica: str) -> None:
        if (attached := self._replicas.pop(replica, None)) is not None:
            attached.frames.put_nowait(None)
            self._steps.release(attached.id)

    def _on_ready(self, info: EngineInfo) -> None:
        log.info(info.summary)
        self._call(self._set_info, info)

    def _set_info(self, info: EngineInfo) -> None:
        assert self._info is not None
        self._info.set_result(info)

    def _on_frames(self, frames: dict[str, Frame], status: EngineStatus) -> None:
        self._call(self._hand_over, frames, status)

    def _hand_over(self, frames: dict[str, Frame], status: EngineStatus) -> None:
        now = time.monotonic()
        idle = status.waiting == status.running == 0
        for attached in self._replicas.values():
            if attached.id in frames:
                attached.send(frames[attached.id], now)
            elif idle or now - attached.sent >= STATUS_SECONDS:
                attached.send(Frame(status), now)

    def _on_failure(self, error: BaseException) -> None:
        self._call(self._give_up, error)

    def _give_up(self, error: BaseException) -> None:
        assert self._info is not None
        if not self._info.done():
            self._info.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            return
        # Half-alive would be worse: a dead engine is noticed, restarted, and its requests resumed.
        log.critical("%s gives up: %s", self._name, error, exc_info=error)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)

    def _call(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call, *args)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 5)
            now = time.monotonic()
            for name, attached in list(self._replicas.items()):
                if now - attached.heard > LEASE_SECONDS:
                    log.warning("replica %s has gone silent: its requests are dropped", name)
                    self._detach(name)
            if (stalled := self._steps.status().stalled) > self._stall_seconds:
                self._give_up(TimeoutError(f"no forward has ended for {stalled:.0f} s"))


class _Attachment:
    """A replica's frames, and when it was last heard from.

    What belongs to it goes by its own id: a step that began before a replica attached anew may
    still have outputs for the attachment before.
    """

    def __init__(self, attachment_id: str) -> None:
        self.id = attachment_id
        self.frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.reading = False
        self.heard = self.sent = time.monotonic()

    def send(self, frame: Frame, now: float) -> None:
        self.sent = now
        self.frames.put_nowait(frame)
