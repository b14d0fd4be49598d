"""A replica's side of the engines: one frame stream each, requests placed, resumed when one dies.

The replica holds every token it has received. When an engine dies, its requests go on elsewhere
as prompt + tokens so far, and the next token is the one that would have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from prometheus_client.metrics_core import Metric
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from engine_actor.messages import LEASE_SECONDS, EngineFailedError, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Output, Request
from engine_actor.step_wire import unpack_steps

log = logging.getLogger("ray.serve")
T = TypeVar("T")

MAX_RESUMES = 3
"""Engine deaths one request may live through; it may itself be what kills them."""
SUSPECT_RESUMES = 2
"""Deaths after which a request is a suspect. Suspects go on one after the other, each once the one
before it has got past the token at which the last engine died; a death until then is its alone."""
REATTACH_SECONDS = 0.25
RETRY_SECONDS = 1.0
"""Between questions for an engine that cannot be had at the moment."""
SUBMIT_SECONDS = 10.0
"""An engine that has not taken a request by then is passed over."""


class QueueFullError(RuntimeError):
    """The engines take no more requests for now; the message gives the figures."""


class NoEngineError(RuntimeError):
    """Every engine is down or starting."""


class EngineLostError(ConnectionError):
    """The engine does not answer any more, or has forgotten this replica."""


class NotAttachedError(EngineLostError):
    """The engine lives, and has forgotten this replica."""


class Engine(Protocol):
    """What the client asks of an engine; every method raises EngineLostError once it is gone."""

    def frames(self, replica: str) -> AsyncIterator[Frame]: ...
    async def submit(self, replica: str, requests: Sequence[Request], again: bool) -> str | None: ...
    async def abort(self, request_ids: Sequence[str], reason: FinishReason) -> None: ...
    async def renew(self, replica: str) -> EngineStatus: ...
    async def detach(self, replica: str) -> None: ...


class Directory(Protocol):
    """Where engines are found."""

    async def engine(self, index: int) -> tuple[str, Engine, EngineInfo]:
        """Name, engine and description of engine `index`, as soon as it lives.

        Raises EngineFailedError if it cannot be built for now.
        """
        ...


class RayEngine:
    """An engine actor behind the Engine protocol."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def frames(self, replica: str) -> AsyncIterator[Frame]:
        """See EngineActor.frames."""
        try:
            async for reference in self._actor.frames.remote(replica):
                yield await reference
        except RayError as error:
            raise EngineLostError(str(error)) from error

    async def submit(self, replica: str, requests: Sequence[Request], again: bool) -> str | None:
        """See EngineActor.submit."""
        refusal: str | None = await self._call(self._actor.submit.remote(replica, requests, again))
        return refusal

    async def abort(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """See EngineActor.abort."""
        await self._call(self._actor.abort.remote(request_ids, reason))

    async def renew(self, replica: str) -> EngineStatus:
        """See EngineActor.renew."""
        status: EngineStatus = await self._call(self._actor.renew.remote(replica))
        return status

    async def detach(self, replica: str) -> None:
        """See EngineActor.detach."""
        await self._call(self._actor.detach.remote(replica))

    async def news(self, since: int) -> tuple[int, bytes]:
        """See EngineActor.news."""
        news: tuple[int, bytes] = await self._call(self._actor.news.remote(since))
        return news

    async def history(self, seconds: float) -> list[bytes]:
        """See EngineView."""
        packed: bytes = await self._call(self._actor.history.remote(seconds))
        return await asyncio.to_thread(unpack_steps, packed)

    async def figures(self) -> list[Metric]:
        """See EngineActor.figures."""
        families: list[Metric] = await self._call(self._actor.figures.remote())
        return families

    async def _call(self, reference: Awaitable[T]) -> T:
        try:
            return await reference
        except RayError as error:
            forgotten = isinstance(error, RayTaskError) and isinstance(error.cause, LookupError)
            raise (NotAttachedError if forgotten else EngineLostError)(str(error)) from error


@dataclass(eq=False)
class _Flight:
    """One request under way: what it would take to start it again elsewhere."""

    request: Request
    sequence: int
    outputs: asyncio.Queue[tuple[int, Output]]
    tokens: list[int] = field(default_factory=list)
    fingerprint: str | None = None
    """Of the engine it was placed on last."""
    last_token: float | None = None
    """When the last of `tokens` came."""
    resumes: int = 0
    earlier_preemptions: int = 0
    """On engines that died."""
    preemptions: int = 0
    over: bool = False
    """Ended, or nobody wants it any more."""
    stream: int = 0
    """The connection's when this was sent last; 0: not sent."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """A token, its end, or the death of its engine has come since this was last cleared."""

    def push(self, output: Output) -> None:
        if output.sampled is not None:
            self.tokens.append(output.sampled.token)
            self.last_token = time.time()
        self.over = output.finish_reason is not None
        self.preemptions = self.earlier_preemptions + output.num_preemptions
        self.outputs.put_nowait((self.sequence, replace(output, num_preemptions=self.preemptions)))
        self.moved.set()

    def resumed(self) -> Request:
        """The request that continues after the tokens received so far."""
        self.earlier_preemptions = self.preemptions
        params = self.request.params
        if self.tokens and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(self.request, params=params, resumed=list(self.tokens), last_token=self.last_token)


@dataclass(eq=False)
class _Connection:
    """One engine as this replica knows it."""

    index: int
    name: str = ""
    engine: Engine | None = None
    info: EngineInfo | None = None
    status: EngineStatus = field(default_factory=EngineStatus)
    stream: int = 0
    """Number of the stream of frames that is read now, unlike that of any other."""
    attachments: int = 0
    """How often the engine has said that it has nothing of this replica's."""
    flights: dict[str, _Flight] = field(default_factory=dict)
    promised: int = 0
    """Tokens placed here since the engine last said how busy it is."""
    heard: float = 0.0
    """When it last said anything."""

    def hear(self, status: EngineStatus) -> None:
        self.status = status
        self.heard = time.monotonic()

    @property
    def slots(self) -> int:
        return 0 if self.info is None else self.info.slots

    @property
    def held(self) -> int:
        """Requests that run or wait there, or are on their way from here, as far as is known."""
        return max(self.status.running + self.status.waiting, len(self.flights))

    @property
    def silent(self) -> float:
        """Seconds without a word beyond what is usual: a frozen process or a lost network."""
        quiet = time.monotonic() - self.heard
        return quiet if quiet > LEASE_SECONDS else 0.0


@dataclass(frozen=True)
class _Refusal:
    """An engine has not taken what was sent there for the first time."""

    connection: _Connection
    flights: Sequence[_Flight]
    error: QueueFullError | NoEngineError


class Generation:
    """The outputs of some requests, merged as they arrive: `async for sequence, output in ...`.

    Ends when every request has ended. `close` drops what has not, at any time.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self.flights = [_Flight(request, i, self._outputs) for i, request in enumerate(requests)]
        self._ended: set[int] = set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while len(self._ended) < len(self.flights):
            sequence, output = await self._outputs.get()
            if sequence not in self._ended:
                if output.finish_reason is not None:
                    self._ended.add(sequence)
                yield sequence, output

    def end(self, sequence: int) -> None:
        """The caller has found the end of this sequence: its slot is free, and it counts as finished."""
        self._ended.add(sequence)
        self._client.drop([self.flights[sequence]], "stop")

    def close(self) -> None:
        """Drop every sequence that has not ended."""
        self._ended.update(flight.sequence for flight in self.flights)
        self._client.drop(self.flights)


class EngineClient:
    """Places requests on `num_engines` engines. One per replica, on one event loop."""

    def __init__(self, replica: str, num_engines: int, directory: Directory, max_waiting: int) -> None:
        self._replica = replica
        self._directory = directory
        self._max_waiting = max_waiting
        self._streams = itertools.count(1)
        self._connections = [_Connection(index) for index in range(num_engines)]
        self._attached = asyncio.Condition()
        self._trial = asyncio.Lock()
        self._suspect: _Flight | None = None
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
        generation = Generation(self, requests)
        try:
            await self._place_new(generation.flights)
        except BaseException:
            generation.close()
            raise
        return generation

    def drop(self, flights: Iterable[_Flight], reason: FinishReason = "abort") -> None:
        """End requests wherever they are. Returns at once; what has ended is ignored."""
        unwanted = [flight for flight in flights if not flight.over]
        for flight in unwanted:
            flight.over = True
            flight.moved.set()
        for connection in self._connections:
            here = [f.request.id for f in unwanted if connection.flights.pop(f.request.id, None)]
            if here and connection.engine is not None:
                self._spawn(_quietly(connection.engine.abort(here, reason)))

    def _live(self) -> list[_Connection]:
        return [connection for connection in self._connections if connection.engine is not None]

    def _answering(self) -> list[_Connection]:
        """The live engines that step and answer; all live ones if none does."""
        live = self._live()
        return [c for c in live if max(c.status.stalled, c.silent) <= LEASE_SECONDS] or live

    def _best(self, fingerprint: str | None, refused: Collection[_Connection]) -> _Connection:
        """The engine with most free KV, of those that answer and have not refused.

        If there is one, it computes like `fingerprint` and, as far as is known here, its queue has room.
        """
        willing = [c for c in self._answering() if c not in refused]
        alike = [c for c in willing if c.info and c.info.fingerprint == fingerprint] or willing
        roomy = [c for c in alike if c.held < c.slots + self._max_waiting] or alike
        return max(roomy, key=lambda c: (c.status.free_kv - c.promised, -c.status.waiting))

    async def _place_new(self, flights: Sequence[_Flight]) -> None:
        """Place flights for the first time; what one engine refuses is offered to the others.

        Raises the refusal once every engine that answers has refused.
        """
        refused: set[_Connection] = set()
        while flights:
            refusals = await self._place(flights, again=False, refused=refused)
            refused.update(refusal.connection for refusal in refusals)
            if refusals and refused.issuperset(self._answering()):
                raise refusals[0].error
            flights = [flight for refusal in refusals for flight in refusal.flights]

    async def _place(
        self, flights: Sequence[_Flight], *, again: bool, refused: Collection[_Connection] = ()
    ) -> list[_Refusal]:
        """Share flights out, each to the engine with most free KV but for those that have `refused`."""
        shares: dict[_Connection, list[_Flight]] = {}
        for flight in flights:
            best = self._best(flight.fingerprint if flight.tokens else None, refused)
            assert best.info is not None
            if flight.tokens and best.info.fingerprint != flight.fingerprint:
                log.warning("%s goes on where bits may differ, on %s", flight.request.id, best.name)
            flight.fingerprint = best.info.fingerprint
            best.promised += len(flight.request.prompt) + len(flight.tokens)
            # Registered before it is sent: a frame may overtake the answer, and a death must find it.
            best.flights[flight.request.id] = flight
            shares.setdefault(best, []).append(flight)
        sends = [self._send(c, c.engine, share, again) for c, share in shares.items() if c.engine]
        return [refusal for refusal in await asyncio.gather(*sends) if refusal is not None]

    async def _send(
        self, connection: _Connection, engine: Engine, flights: Sequence[_Flight], again: bool
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

    async def _keep(self, connection: _Connection) -> None:
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
            except (RayError, RayServeException) as error:
                log.warning("the supervisor does not answer: %s", error)
            except Exception:
                # Whatever it was: an engine that nobody keeps is an engine that nobody uses again.
                log.exception("%s was left", connection.name or f"engine-{connection.index}")
            await asyncio.sleep(pause)

    async def _follow(self, connection: _Connection) -> None:
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

    async def _attach(self, connection: _Connection, engine: Engine) -> None:
        connection.engine = engine
        connection.attachments += 1
        self._strand(connection)
        async with self._attached:
            self._attached.notify_all()

    def _strand(self, connection: _Connection) -> None:
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
            self._spawn(self._resume(stranded))

    def _receive(self, connection: _Connection, frame: Frame) -> None:
        connection.hear(frame.status)
        connection.promised = 0
        for output in frame.outputs:
            flight = connection.flights.get(output.request_id)
            if flight is not None:
                if output.finish_reason is not None:
                    del connection.flights[output.request_id]
                flight.push(output)

    async def _renew(self, connection: _Connection, engine: Engine) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 10)
            try:
                connection.hear(await engine.renew(self._replica))
            except EngineLostError:
                return

    async def _resume(self, stranded: Sequence[_Flight]) -> None:
        """Go on with requests whose engine died: on another one, or on the same one when it is back."""
        going_on = []
        for flight in stranded:
            if flight.resumes <= MAX_RESUMES:
                going_on.append(flight)
            else:
                message = f"{flight.resumes} engines died while they worked on this request"
                flight.push(Output(flight.request.id, len(flight.tokens), None, "error", message))
        log.warning("resuming %d requests", len(going_on))
        await self._place_again([flight for flight in going_on if flight.resumes < SUSPECT_RESUMES])
        for flight in going_on:
            if flight.resumes >= SUSPECT_RESUMES:
                async with self._trial:
                    self._suspect = flight
                    flight.moved.clear()
                    if await self._place_again([flight]):
                        await flight.moved.wait()
                    self._suspect = None

    async def _place_again(self, flights: Sequence[_Flight]) -> bool:
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
        task.add_done_callback(self._tasks.discard)


async def _quietly(abort: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(EngineLostError):
        await abort
