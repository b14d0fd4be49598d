"""Owns the engine actors: creates them, watches them, and starts a dead one again.

It is a Serve deployment, so that Serve restarts it and `serve shutdown` ends it; and it owns the
engines as plain child actors, so that Ray ends them with it. No engine outlives the application.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import ray.util.metrics
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from engine_actor.actor import EngineActor, build
from engine_actor.messages import EngineConfig, EngineFailedError, EngineInfo, TelemetryConfig
from engine_actor.telemetry import open_telemetry

log = logging.getLogger("ray.serve")

MAX_BACKOFF_SECONDS = 30.0
PING_SECONDS = 5.0
STEADY_SECONDS = 60.0
"""An engine that lived this long did not die of how it started: the next start is not delayed."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of one engine; a restart is another one."""

    name: str
    actor: ActorHandle
    info: EngineInfo


class Supervisor:
    """Engines 0..num_engines - 1, each built from `config` inside its own actor."""

    def __init__(
        self,
        num_engines: int,
        config: EngineConfig,
        telemetry: TelemetryConfig,
    ) -> None:
        self._application = serve.get_replica_context().app_name
        self._config = config
        self._telemetry = telemetry
        self._num_engines = num_engines
        self._alive: list[Incarnation | None] = [None] * num_engines
        self._failures: list[str | None] = [None] * num_engines
        """Why an engine could not be built, if that is how its last life ended."""
        self._refusals: Counter[tuple[int, str]] = Counter()
        self._changed = asyncio.Condition()
        self._watches = [asyncio.ensure_future(self._watch(index)) for index in range(num_engines)]

    async def engine(self, index: int) -> Incarnation:
        """Engine `index`, as soon as it lives.

        Raises EngineFailedError if it could not be built; the supervisor goes on trying.
        """
        async with self._changed:
            while True:
                alive = self._alive[index]
                if alive is not None:
                    return alive
                if (failure := self._failures[index]) is not None:
                    raise EngineFailedError(failure)
                await self._changed.wait()

    def add_refusals(self, counts: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], int]:
        """Add what a replica has refused, by status and reason, and return what all have since the start."""
        self._refusals.update(counts)
        return dict(self._refusals)

    def check_health(self) -> None:
        """Serve's question. Raises, and so is started again, if an engine is no longer watched."""
        for watch in self._watches:
            if watch.done():
                raise RuntimeError("an engine is no longer watched") from watch.exception()

    async def _watch(self, index: int) -> None:
        """Start engine `index` again whenever it dies."""
        backoff = 1.0
        while True:
            started = time.monotonic()
            try:
                actor = self._start(index)
            except ValueError:
                # The name still belongs to the life before; it will be free in a moment.
                log.info("engine %d has not left yet", index)
            else:
                await self._live(index, actor)
                ray.kill(actor)
            if time.monotonic() - started > STEADY_SECONDS:
                backoff = 1.0
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _live(self, index: int, actor: ActorHandle) -> None:
        """One life: return when it is over, or when it could not begin."""
        try:
            info: EngineInfo = await actor.ready.remote()
        except RayError as error:
            reason = error.cause if isinstance(error, RayTaskError) else error
            log.error("engine %d could not be built: %s", index, reason)
            await self._change(index, None, f"engine {index} could not be built: {reason}")
            return
        await self._change(index, Incarnation(f"engine-{index}", actor, info))
        try:
            await self._until_it_is_gone(actor)
        except (RayError, TimeoutError) as error:
            # Not only RayActorError: one that ran out of memory, or with its node, has an error of its own.
            log.error("engine %d is gone, starting it again: %s", index, error)
        await self._change(index, None)

    async def _until_it_is_gone(self, actor: ActorHandle) -> None:
        """Raises RayError when the actor has died, and TimeoutError when its process answers no more.

        An engine notices by itself when its steps stall, but not when all of its process stands still.
        """
        lifetime = asyncio.ensure_future(actor.lifetime.remote())
        try:
            while not lifetime.done():
                try:
                    await asyncio.wait_for(actor.ping.remote(), self._config.stall_seconds)
                except TimeoutError:
                    silence = f"its process has not answered for {self._config.stall_seconds:g} s"
                    raise TimeoutError(silence) from None
                await asyncio.wait({lifetime}, timeout=PING_SECONDS)
            lifetime.result()
        finally:
            lifetime.cancel()

    async def _change(self, index: int, alive: Incarnation | None, failure: str | None = None) -> None:
        async with self._changed:
            self._alive[index] = alive
            self._failures[index] = failure
            self._changed.notify_all()

    def _start(self, index: int) -> ActorHandle:
        threads = self._config.threads or self._thread_share()
        config = dataclasses.replace(self._config, threads=threads)
        name = f"{self._application}-engine-{index}"
        gauge = ray.util.metrics.Gauge
        telemetry = functools.partial(open_telemetry, f"engine-{index}", self._telemetry, gauge)
        actor_class = ray.remote(EngineActor).options(name=name, num_cpus=0, num_gpus=self._gpu_share())
        return actor_class.remote(
            name, functools.partial(build, config), config.max_waiting, config.stall_seconds, telemetry
        )

    def _gpu_share(self) -> float:
        """A GPU, or so much of one that all engines find a place; 0 where there is none."""
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if self._config.device == "cpu" or not gpus:
            return 0
        return 1 / math.ceil(self._num_engines / gpus)

    def _thread_share(self) -> int:
        """Threads of an engine when those of one node share its cores."""
        nodes: int = sum(node["Alive"] for node in ray.nodes())
        return max(1, len(os.sched_getaffinity(0)) // math.ceil(self._num_engines / nodes))
