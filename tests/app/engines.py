"""Engines in this process, behind the client's protocol: no Ray, no model files."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import torch

from app.engine_port import EngineLostError, NotAttachedError
from app.refusals import Counts
from engine_actor.actor import EngineActor
from engine_actor.engine import Engine
from engine_actor.messages import EngineFailedError, EngineInfo, EngineStatus, Frame
from engine_actor.request import FinishReason, Request
from model.batch import Batch
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.fakes import VOCAB, FakeModel, fake_storage, fake_telemetry

READS = 1 << 16
"""Token ids below it are read: all that a real tokenizer writes."""
POISON = VOCAB - 1
"""A prompt that begins with this token makes the toy model fail."""


class PacedModel(FakeModel):
    """The toy model at a pace that leaves time to interfere, and with something to choke on."""

    vocab_size = READS
    """It reads what a real tokenizer writes, and answers with the first few tokens."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        time.sleep(self.seconds)
        if ((batch.tokens == POISON) & (batch.positions == 0)).any():
            raise ValueError("the toy model choked")
        return super().forward(batch, storage)


def build_toy(
    *, seconds: float = 0.0, num_slots: int = 4, max_len: int = 64, kv_budget: int | None = None
) -> Callable[[], tuple[Engine, EngineInfo]]:
    """Builds an engine around the toy model."""

    def build() -> tuple[Engine, EngineInfo]:
        executor = ModelExecutor(PacedModel(seconds), fake_storage(num_slots, max_len))
        engine = Engine(executor, Fcfs(), kv_budget=kv_budget)
        largest = engine.scheduler.largest_request
        info = EngineInfo("a toy", READS, max_len, largest, True, "fp_toy", num_slots, "chunked", "fcfs")
        return engine, info

    return build


class LocalEngine:
    """An EngineActor that can be killed. Messages are copied, as Ray would."""

    def __init__(self, build: Callable[[], tuple[Engine, EngineInfo]], max_waiting: int = 100) -> None:
        self.actor = EngineActor("engine", build, max_waiting, 60.0, fake_telemetry)
        self.dead = asyncio.Event()

    def kill(self) -> None:
        """Die as a process does: every call and every stream fails from now on."""
        self.dead.set()
        self.actor._steps.stop()

    async def frames(self, replica: str) -> AsyncIterator[Frame]:
        stream = self.actor.frames(replica)
        death = asyncio.ensure_future(self.dead.wait())
        while True:
            following = asyncio.ensure_future(anext(stream, None))
            try:
                await asyncio.wait({following, death}, return_when=asyncio.FIRST_COMPLETED)
                self._alive()
                frame = following.result()
            finally:
                following.cancel()
            if frame is None:
                return
            yield pickle.loads(pickle.dumps(frame))

    async def submit(self, replica: str, requests: Sequence[Request], again: bool) -> str | None:
        self._alive()
        try:
            return await self.actor.submit(replica, pickle.loads(pickle.dumps(requests)), again)
        except LookupError as error:
            raise NotAttachedError(str(error)) from error

    async def abort(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        self._alive()
        await self.actor.abort(request_ids, reason)

    async def renew(self, replica: str) -> EngineStatus:
        self._alive()
        return await self.actor.renew(replica)

    async def detach(self, replica: str) -> None:
        self._alive()
        await self.actor.detach(replica)

    def _alive(self) -> None:
        if self.dead.is_set():
            raise EngineLostError("killed")


class LocalDirectory:
    """Starts engines on demand, and again once they are dead."""

    def __init__(self, build: Callable[[], tuple[Engine, EngineInfo]], max_waiting: int = 100) -> None:
        self._build = build
        self.max_waiting = max_waiting
        self.engines: dict[int, LocalEngine] = {}
        self._started: list[LocalEngine] = []
        self.restarting = True
        self.refusals: Counter[tuple[int, str]] = Counter()

    async def engine(self, index: int) -> tuple[str, LocalEngine, EngineInfo]:
        engine = self.engines.get(index)
        if engine is None or engine.dead.is_set():
            while engine is not None and not self.restarting:
                await asyncio.sleep(0.01)
            engine = self.engines[index] = LocalEngine(self._build, self.max_waiting)
            self._started.append(engine)
        try:
            return f"engine-{index}", engine, await engine.actor.ready()
        except RuntimeError as error:
            raise EngineFailedError(str(error)) from error

    async def add_refusals(self, counts: Counts) -> Counts:
        self.refusals.update(counts)
        return dict(self.refusals)

    def stop(self) -> None:
        for engine in self._started:
            engine.kill()
            engine.actor._steps.join()
