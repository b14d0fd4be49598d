"""Engines are started again, whatever ended them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import ActorUnschedulableError, NodeDiedError, OutOfMemoryError

from engine_actor import supervisor
from engine_actor.messages import EngineConfig, EngineFailedError, EngineInfo, TelemetryConfig
from engine_actor.supervisor import Supervisor

INFO = EngineInfo("a toy", 97, 64, 64, True, "fp_toy", 2, "chunked", "fcfs")


class Actor:
    """An engine actor's handle; the test ends its build and its life."""

    def __init__(self) -> None:
        self.built: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready = SimpleNamespace(remote=lambda: self.built)
        self.lifetime = SimpleNamespace(remote=lambda: self.ended)


def test_an_engine_is_started_again_however_ray_says_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[Actor] = []
    killed: list[Any] = []

    def start(self: Supervisor, index: int) -> Actor:
        lives.append(Actor())
        return lives[-1]

    async def life(count: int) -> Actor:
        while len(lives) < count:
            await asyncio.sleep(0.001)
        return lives[-1]

    async def scenario() -> None:
        subject = Supervisor(1, EngineConfig(), TelemetryConfig())
        for count, end in enumerate([OutOfMemoryError("the node is short of memory"), NodeDiedError("gone")]):
            (actor := await life(count + 1)).built.set_result(INFO)
            assert (await subject.engine(0)).actor is actor
            actor.ended.set_exception(end)
        (await life(3)).built.set_exception(ActorUnschedulableError("no node has a GPU"))
        with pytest.raises(EngineFailedError, match="no node has a GPU"):
            await subject.engine(0)
        (actor := await life(4)).built.set_result(INFO)
        while killed != lives[:3]:
            await asyncio.sleep(0.001)
        subject.check_health()
        for watch in subject._watches:
            watch.cancel()

    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="toy"))
    monkeypatch.setattr(Supervisor, "_start", start)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(scenario(), 20))
