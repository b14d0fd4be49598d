"""What Ray raises, in the client's own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayTaskError, RuntimeEnvSetupError
from ray.serve.exceptions import DeploymentUnavailableError

from app.engine_port import DirectoryLostError, EngineLostError, NotAttachedError
from app.ray_engines import RayEngine, SupervisorDirectory
from engine_actor.messages import EngineFailedError


def test_every_way_an_engine_can_end_in_ray_is_an_engine_lost() -> None:
    async def lost() -> None:
        raise OutOfMemoryError("the engine took all memory")

    class Dead:
        def __init__(self) -> None:
            self.renew = self.frames = self

        def remote(self, replica: str) -> Any:
            return self if replica == "reader" else lost()

        async def __aiter__(self) -> AsyncIterator[Any]:
            yield lost()

    async def scenario() -> None:
        engine = RayEngine(Dead())
        with pytest.raises(EngineLostError, match="all memory"):
            await engine.renew("replica")
        with pytest.raises(EngineLostError, match="all memory"):
            await anext(engine.frames("reader"))

    asyncio.run(scenario())


def test_an_engine_that_lives_and_has_forgotten_the_replica_is_told_apart() -> None:
    async def forgotten() -> None:
        raise RayTaskError("submit", "", LookupError("replica r is not attached")).as_instanceof_cause()

    async def scenario() -> None:
        actor = SimpleNamespace(submit=SimpleNamespace(remote=lambda *_: forgotten()))
        with pytest.raises(NotAttachedError):
            await RayEngine(actor).submit("r", [], False)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DeploymentUnavailableError("not now"), DirectoryLostError),
        (RuntimeEnvSetupError("not now"), DirectoryLostError),
        (RayTaskError("engine", "not now", EngineFailedError()).as_instanceof_cause(), EngineFailedError),
    ],
)
def test_a_supervisor_that_is_away_is_told_from_an_engine_that_cannot_be_built(
    raised: Exception, expected: type[Exception]
) -> None:
    async def engine(index: int) -> None:
        raise raised

    async def scenario() -> None:
        supervisor = SimpleNamespace(engine=SimpleNamespace(remote=engine))
        with pytest.raises(expected, match="not now"):
            await SupervisorDirectory(supervisor).engine(0)

    asyncio.run(scenario())
