"""A replica's side of the engines: one frame stream each, requests placed, resumed when one dies.

The replica holds every token it has received. When an engine dies, its requests go on elsewhere
as prompt + tokens so far, and the next token is the one that would have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.affinity import Affinity
from app.connection import Connection
from app.engine_port import Directory, DirectoryLostError, Engine, EngineLostError, NotAttachedError
from app.flight import Flight
from app.generation import Generation
from app.placement import best
from engine_actor.messages import LEASE_SECONDS, EngineFailedError, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Request

log = logging.getLogger("ray.serve")

MAX_RESUMES = 3
"""Engine deaths one request may live through; it may itself be what kills them."""
SUSPECT_RESUMES = 2
"""Deaths after which a request is a suspect. Suspects go on one after the other, each once the one
before it has got past the token at which the last engine died; a death until then is its alone."""
REATTACH_SECONDS = 0.25
RETRY_SECONDS = 1.0
"""Between questions for an engine that cannot be had at the moment."""
RENEWAL_PAUSE, RENEWAL_LIMIT = 0.1, 0.3
"""Between two renewals of a lease, and the longest that one may take, of its term: some may fail."""
SUBMIT_SECONDS = 10.0
"""An engine that has not taken a request by then is passed over."""


class QueueFullError(RuntimeError):
    """The engines take no more requests for now; the message gives the figures."""


class NoEngineError(RuntimeError):
    """Every engine is down or starting."""


@dataclass(frozen=True)
class _Refusal:
    """An engine has not taken what was sent there for the first time."""

    connection: Connection
    flights: Sequence[Flight]
    error: QueueFullError | NoEngineError


class EngineClient:
    """Places requests on `num_engines` engines. One per replica, on one event loop."""

    def __init__(self, replica: str, num_engines: int, directory: Directory, max_waiting: int) -> None:
        self._replica = replica
        self._directory = directory
        self._max_waiting = max_waiting
        self._streams = itertools.count(1)
        self._connections = [Connection(index) for index in range(num_engines)]
        self._affinity = Affinity()
        self._attached = asyncio.Condition()
        self._trial = asyncio.Lock()
        self._suspect: Flight | None = None
        """Whose trial it is."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: EngineFailedError | None = None
        self._background: list[asyncio.Task[None]] = []
        self.info: EngineInfo
        """Of the first engine attached; all are built from the same settings."""

    async def start(self) -> None:
        """Return once an engine is attached. Raises what keeps the engines from being built."""
        self._background = [asyncio.create_task(self._keep(c)) for c in self._connections]
        async with self._attached:
            await self._attached.wait_for(lambda: self._failure is not None or bool(self._live()))
        if not self._live() and self._failure is not None:
            await self.stop()
            raise self._failure
        self.info = next(c.info for c in self._live() if c.info is not None)

    async def stop(self) -> None:
        """Detach from every engine, which drops what this replica has there."""
        engines = [connection.engine for connection in self._live() if connection.engine]
        await asyncio.gather(*(_quietly(engine.detach(self._replica)) for engine in engines))
        for task in [*self._background, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._background, *self._tasks, return_exceptions=True)

    def statuses(self) -> dict[str, EngineStatus | None]:
        """How busy each engine is; None for one that is down. One that is silent counts as stalled."""
        return {
            c.name or f"engine-{c.index}": replace(c.status, stalled=max(c.status.stalled, c.silent))
            if c.engine
            else None
            for c in self._connections
        }

    def engines(self) -> dict[str, tuple[Engine, EngineInfo]]:
        """The engines that are attached, by name."""
        return {c.name: (c.engine, c.info) for c in self._connections if c.engine and c.info}

    async def generate(self, requests: Sequence[Request]) -> Generation:
        """Place requests, all or none. Raises QueueFullError or NoEngineError."""
        if not self._live():
            raise NoEngineError("no engine is running at the moment; one is being started")
        generation = Generation(self.drop, requests)
        try:
            await self._place_new(generation.flights)
        except BaseException:
            generation.close()
            raise
        return generation

    def drop(self, flights: Iterable[Flight], reason: FinishReason) -> None:
        """End requests wherever they are. Returns at once; what has ended is ignored."""
        unwanted = [flight for flight in flights if not flight.over]
        for flight in unwanted:
            flight.over = True
            flight.moved.set()
        for connection in self._connections:
            here = [f.request.id for f in unwanted if connection.flights.pop(f.request.id, None)]
            if here and connection.engine is not None:
                self._spawn(_quietly(connection.engine.abort(here, reason)))

    def _live(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.engine is not None]

    def _answering(self) -> list[Connection]:
        """The live engines that step and answer; all live ones if none does."""
        live = self._live()
        return [c for c in live if max(c.status.stalled, c.silent) <= LEASE_SECONDS] or live

    def _best(self, flight: Flight, refused: Collection[Connection]) -> Connection:
        """The best of those that answer and have not refused."""
        willing = [c for c in self._answering() if c not in refused]
        if len(self._connections) == 1:
            return best(willing, flight.fingerprint, self._max_waiting)
        index = self._affinity.engine(flight.request)
        remembering = None if index is None else self._connections[index]
        chosen = best(willing, flight.fingerprint, self._max_waiting, remembering)
        self._affinity.note(flight.request, chosen.index)
        return chosen

    async def _place_new(self, flights: Sequence[Flight]) -> None:
        """Place flights for the first time; what one engine refuses is offered to the others.

        Raises the refusal once every engine that answers has refused.
        """
        refused: set[Connection] = set()
        while flights:
            refusals = await self._place(flights, again=False, refused=refused)
            refused.update(refusal.connection for refusal in refusals)
            if refusals and refused.issuperset(self._answering()):
                raise refusals[0].error
            flights = [flight for refusal in refusals for flight in refusal.flights]

    async def _place(
        self, flights: Sequence[Flight], *, again: bool, refused: Collection[Connection] = ()
    ) -> list[_Refusal]:
        """Share flights out, each to the engine with most free KV but for those that have `refused`."""
        shares: dict[Connection, list[Flight]] = {}
        for flight in flights:
            chosen = self._best(flight, refused)
            assert chosen.info is not None
            if not flight.place(chosen.info.fingerprint):
                log.warning("%s goes on where bits may differ, on %s", flight.request.id, chosen.name)
            chosen.promised += len(flight.request.prompt) + len(flight.tokens)
            # Registered before it is sent: a frame may overtake the answer, and a death must find it.
            chosen.flights[flight.request.id] = flight
            shares.setdefault(chosen, []).append(flight)
        sends = [self._send(c, c.engine, share, again) for c, share in shares.items() if c.engine]
        return [refusal for refusal in await asyncio.gather(*sends) if refusal is not None]

    async def _send(
        self, connection: Connection, engine: Engine, flights: Sequence[Flight], again: bool
    ) -> _Refusal | None:
        stream, attachments = connection.stream, connection.attachments
        # One that was stranded since it was placed is on its way elsewhere.
        placed = [flight for flight in flights if connection.flights.get(flight.request.id) is flight]
        for flight in placed:
            flight.stream = stream
        # Frames may have overtaken an answer that came too late.
        requests = [flight.resumed() if again or flight.tokens else flight.request for flight in placed]
        error: QueueFullError | NoEngineError
        try:
            async with asyncio.timeout(None if again else SUBMIT_SECONDS):
                refusal = await engine.submit(self._replica, requests, again)
            if refusal is None:
                return None
            error = QueueFullError(refusal)
        except EngineLostError as lost:
            unsent = [flight for flight in placed if flight.stream == stream]
            for flight in unsent:
                flight.stream = 0
            # The next attachment strands what was not sent. It may have been quicker than this answer.
            if unsent and isinstance(lost, NotAttachedError) and connection.attachments > attachments:
                self._strand(connection)
            return None
        except TimeoutError:
            error = NoEngineError(f"{connection.name} has not answered for {SUBMIT_SECONDS:g} s")
        untaken = [flight for flight in placed if flight.stream == stream and not flight.over]
        for flight in untaken:
            connection.flights.pop(flight.request.id, None)
        if isinstance(error, NoEngineError):
            # It may take them yet, once it answers again.
            self._spawn(_quietly(engine.abort([flight.request.id for flight in untaken], "abort")))
        return _Refusal(connection, untaken, error)

    async def _keep(self, connection: Connection) -> None:
        """Stay attached to engine `index` through all its lives."""
        while True:
            pause = RETRY_SECONDS
            try:
                await self._follow(connection)
            except EngineLostError as error:
                log.warning("%s is lost: %s", connection.name, error)
                pause = REATTACH_SECONDS
            except EngineFailedError as error:
                await self._report(error)
            except DirectoryLostError as error:
                log.warning("the supervisor does not answer: %s", error)
            except Exception:
                # Whatever it was: an engine that nobody keeps is an engine that nobody uses again.
                log.exception("%s was left", connection.name or f"engine-{connection.index}")
            await asyncio.sleep(pause)

    async def _follow(self, connection: Connection) -> None:
        """Read an engine's frames through one of its lives. Raises EngineLostError at its end."""
        connection.name, engine, connection.info = await self._directory.engine(connection.index)
        renewing = asyncio.create_task(self._renew(connection, engine))
        try:
            while True:
                connection.stream = next(self._streams)
                async for frame in engine.frames(self._replica):
                    if frame.attached:
                        await self._attach(connection, engine)
                    self._receive(connection, frame)
        finally:
            renewing.cancel()
            connection.engine = None
            connection.stream = next(self._streams)
            self._strand(connection)

    async def _attach(self, connection: Connection, engine: Engine) -> None:
        connection.engine = engine
        connection.attachments += 1
        self._strand(connection)
        async with self._attached:
            self._attached.notify_all()

    def _strand(self, connection: Connection) -> None:
        """The engine has none of what was sent before this stream: go on with it elsewhere, or there anew.

        An engine that has forgotten this replica ends its stream first. So what was sent since was taken by
        the attachment that follows, however late we hear of that.
        """
        stranded = [flight for flight in connection.flights.values() if flight.stream != connection.stream]
        for flight in stranded:
            del connection.flights[flight.request.id]
            flight.stream = 0
        suspect = self._suspect
        blamed = [suspect] if suspect in stranded and not suspect.moved.is_set() else stranded
        for flight in blamed:
            flight.resumes += 1
        for flight in stranded:
            flight.moved.set()
        if stranded:
            self._spawn(self._resume_or_fail(stranded))

    def _receive(self, connection: Connection, frame: Frame) -> None:
        connection.hear(frame.status)
        connection.promised = 0
        for output in frame.outputs:
            flight = connection.flights.get(output.request_id)
            if flight is not None:
                if output.finish_reason is not None:
                    del connection.flights[output.request_id]
                flight.push(output)

    async def _renew(self, connection: Connection, engine: Engine) -> None:
        """Keep the lease until the frames end: then the engine is gone, whatever a renewal said before."""
        while True:
            await asyncio.sleep(RENEWAL_PAUSE * LEASE_SECONDS)
            try:
                async with asyncio.timeout(RENEWAL_LIMIT * LEASE_SECONDS):
                    connection.hear(await engine.renew(self._replica))
            except (EngineLostError, TimeoutError) as error:
                log.warning(
                    "%s: the lease was not renewed, trying again: %s", connection.name, error or "late"
                )

    async def _resume_or_fail(self, stranded: Sequence[Flight]) -> None:
        """Whatever goes wrong, nobody waits for ever for a request that is nowhere."""
        try:
            await self._resume(stranded)
        except Exception as error:
            for flight in stranded:
                if not flight.over and all(flight.request.id not in c.flights for c in self._connections):
                    flight.fail(f"it could not be resumed: {error}")
            raise

    async def _resume(self, stranded: Sequence[Flight]) -> None:
        """Go on with requests whose engine died: on another one, or on the same one when it is back."""
        going_on = []
        for flight in stranded:
            if flight.resumes <= MAX_RESUMES:
                going_on.append(flight)
            else:
                flight.fail(f"{flight.resumes} engines died while they worked on this request")
        log.warning("resuming %d requests", len(going_on))
        await self._place_again([flight for flight in going_on if flight.resumes < SUSPECT_RESUMES])
        for flight in going_on:
            if flight.resumes >= SUSPECT_RESUMES:
                async with self._trial:
                    self._suspect = flight
                    flight.moved.clear()
                    try:
                        if await self._place_again([flight]):
                            await flight.moved.wait()
                    finally:
                        self._suspect = None

    async def _place_again(self, flights: Sequence[Flight]) -> bool:
        """Place what is still wanted as soon as an engine is there; False: nothing was."""
        async with self._attached:
            await self._attached.wait_for(lambda: bool(self._live()))
        wanted = [flight for flight in flights if not flight.over]
        await self._place(wanted, again=True)
        return bool(wanted)

    async def _report(self, error: EngineFailedError) -> None:
        async with self._attached:
            self._failure = error
            self._attached.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the engine client has failed", exc_info=error)


async def _quietly(abort: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(EngineLostError):
        await abort
