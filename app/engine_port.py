"""What a replica asks of engines, and of whoever knows where they are. Ray is one way to carry it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine_actor.messages import EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Request


class EngineLostError(ConnectionError):
    """The engine does not answer any more, or has forgotten this replica."""


class NotAttachedError(EngineLostError):
    """The engine lives, and has forgotten this replica."""


class DirectoryLostError(ConnectionError):
    """The directory does not answer at the moment."""


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

        Raises EngineFailedError if it cannot be built for now, and DirectoryLostError.
        """
        ...
