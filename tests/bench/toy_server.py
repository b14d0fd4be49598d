"""What `bench.serving.served` starts, on the toy model and without Ray: the same HTTP, service and engine."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

from app.config import Settings
from app.engine_client import EngineClient
from app.ingress import create_app
from app.live import EngineView
from app.refusals import Refusals
from app.service import Service
from app.tenants import Tenants
from app.tokenizer import Tokenizer
from engine_actor.engine import Engine
from engine_actor.messages import EngineInfo
from model.model_executor import ModelExecutor
from policies import load_policy
from tests.app.engines import LocalDirectory, LocalEngine
from tests.fakes import fake_storage
from tests.observed import LocalView, TimedModel

STEP_SECONDS, ROW_SECONDS = 0.005, 0.001


@dataclass
class ToyServer:
    url: str


class ToyModel(TimedModel):
    vocab_size = 1 << 16
    """It reads what workloads hold, and answers with the first few tokens."""


class ToyService(Service):
    def views(self) -> dict[str, EngineView]:
        return {
            name: LocalView(name, engine.actor._telemetry)
            for name, (engine, _) in self.client.engines().items()
            if isinstance(engine, LocalEngine)
        }


def toy_served(tokenizer: Tokenizer) -> Callable[[Mapping[str, Any]], AbstractContextManager[ToyServer]]:
    """A stand-in for `served`, with this tokenizer."""

    @contextmanager
    def served(settings: Mapping[str, Any]) -> Iterator[ToyServer]:
        known = Settings(**settings)
        directory = LocalDirectory(_build(known))
        client = EngineClient("replica", 1, directory, known.max_waiting)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await client.start()
            yield
            await client.stop()

        app = create_app(
            ToyService(known, tokenizer, client, Tenants({}, known.max_tenants), Refusals(directory)),
            lifespan,
        )
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the application did not start"
            time.sleep(0.01)
        try:
            yield ToyServer(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(timeout=5)
            directory.stop()

    return served


def _build(settings: Settings) -> Callable[[], tuple[Engine, EngineInfo]]:
    def build() -> tuple[Engine, EngineInfo]:
        slots, length, mode, policy = settings.max_num_seqs, settings.max_len, settings.mode, settings.policy
        model = ToyModel(STEP_SECONDS, ROW_SECONDS)
        engine = Engine(
            ModelExecutor(model, fake_storage(slots, length, poison=False)), load_policy(policy), mode=mode
        )
        largest = engine.scheduler.largest_request
        return engine, EngineInfo(
            "a toy", model.vocab_size, length, largest, True, "fp_toy", slots, mode, policy
        )

    return build
