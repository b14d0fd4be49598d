"""Engines that are Ray actors, and the supervisor that knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.engine_port import DirectoryLostError, EngineLostError, NotAttachedError
from app.refusals import Counts
from engine_actor.clock import Sent
from engine_actor.messages import EngineFailedError, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Request
from engine_actor.step_wire import unpack_steps

T = TypeVar("T")


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
        refusal: str | None = await self._call(self._actor.submit.remote(replica, requests, again, Sent()))
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


class SupervisorDirectory:
    """Finds engines, and adds up what replicas count, through the supervisor's deployment handle."""

    def __init__(self, supervisor: DeploymentHandle) -> None:
        self._supervisor = supervisor

    async def engine(self, index: int) -> tuple[str, RayEngine, EngineInfo]:
        """See Directory."""
        found = await self._ask(self._supervisor.engine.remote(index))
        return found.name, RayEngine(found.actor), found.info

    async def add_refusals(self, counts: Counts) -> Counts:
        """See Tally."""
        totals: Counts = await self._ask(self._supervisor.add_refusals.remote(counts))
        return totals

    async def _ask(self, answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - untyped Ray
        try:
            return await answer
        except EngineFailedError:
            # Serve's errors of user code are RayErrors too, by a class made for each.
            raise
        except (RayError, RayServeException) as error:
            raise DirectoryLostError(str(error)) from error
