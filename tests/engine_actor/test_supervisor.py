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
        self.answers = True
        self.ping = SimpleNamespace(remote=self._ping)

    async def _ping(self) -> None:
        if not self.answers:
            await asyncio.Event().wait()


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
        subject = Supervisor(1, EngineConfig(stall_seconds=0.05), TelemetryConfig())
        for count, end in enumerate([OutOfMemoryError("the node is short of memory"), NodeDiedError("gone")]):
            (actor := await life(count + 1)).built.set_result(INFO)
            assert (await subject.engine(0)).actor is actor
            actor.ended.set_exception(end)
        (await life(3)).built.set_exception(ActorUnschedulableError("no node has a GPU"))
        with pytest.raises(EngineFailedError, match="no node has a GPU"):
            await subject.engine(0)
        (actor := await life(4)).answers = False
        actor.built.set_result(INFO)
        (await life(5)).built.set_result(INFO)
        while killed != lives[:4]:
            await asyncio.sleep(0.001)
        subject.check_health()
        for watch in subject._watches:
            watch.cancel()

    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="toy"))
    monkeypatch.setattr(Supervisor, "_start", start)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(scenario(), 20))


def alone(num_engines: int, config: EngineConfig) -> Supervisor:
    """One that starts nothing."""
    subject = object.__new__(Supervisor)
    subject._num_engines, subject._config = num_engines, config
    return subject


@pytest.mark.parametrize(
    ("engines", "gpus", "device", "share"),
    [
        (1, 0, "auto", 0),
        (1, 1, "auto", 1),
        (2, 1, "auto", 0.5),
        (3, 2, "auto", 0.5),
        (1, 4, "auto", 1),
        (2, 2, "cpu", 0),
    ],
)
def test_engines_share_the_gpus_so_that_all_find_a_place(
    monkeypatch: pytest.MonkeyPatch, engines: int, gpus: int, device: Any, share: float
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0} | ({"GPU": gpus} if gpus else {}))
    assert alone(engines, EngineConfig(device=device))._gpu_share() == share


@pytest.mark.parametrize(("engines", "cores", "share"), [(1, 8, 8), (2, 8, 8), (3, 8, 4), (4, 2, 1)])
def test_engines_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, engines: int, cores: int, share: int
) -> None:
    """On two nodes, one of them besides dead: a node carries half of the engines."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert alone(engines, EngineConfig())._thread_share() == share
