"""The Ray actor around the step loop, and one stream of frames for each replica.

The actor's asyncio loop talks to replicas; the step thread meets it twice a step: the inbox is emptied before
it, and its frames are handed over after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from prometheus_client.metrics_core import Metric

from engine_actor.clock import Sent
from engine_actor.engine import Engine
from engine_actor.messages import LEASE_SECONDS, EngineConfig, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Request
from engine_actor.step_loop import Build, StepLoop
from engine_actor.step_wire import pack_steps
from engine_actor.telemetry import Telemetry

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.25
"""How stale a replica's view of an engine that steps for others may become."""
FRAMES_PER_STREAM = 100_000


def build(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """See build_engine. Whoever starts actors needs no torch: it is loaded where the engine is."""
    from engine_actor.build import build_engine

    return build_engine(config)


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

    async def submit(
        self, replica: str, requests: Sequence[Request], again: bool = False, sent: Sent | None = None
    ) -> str | None:
        """Queue requests, all or none. None: accepted; else why the queue does not take them.

        `sent` tells a replica on another machine, whose clock is another, from one on this.
        Raises LookupError if the replica is not attached: nobody would read the outputs.
        """
        attached = self._replicas.get(replica)
        if attached is None:
            raise LookupError(f"replica {replica} is not attached")
        if sent is not None and (ahead := sent.ahead()):
            for request in requests:
                request.arrival += ahead
                if request.last_token is not None:
                    request.last_token += ahead
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
        self._telemetry.close(self._steps.unfinished())
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
