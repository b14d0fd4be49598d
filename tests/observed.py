"""An engine on the toy model with the observing routes around it, without Ray: for tests of the routes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import AsyncMock

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client.metrics_core import Metric

from app.api_error import ApiError
from app.observe import Observatory
from engine_actor import request as engine_request
from engine_actor.engine import Engine
from engine_actor.history import StepHistory
from engine_actor.metrics import EngineMetrics
from engine_actor.scheduler import Mode
from engine_actor.telemetry import Telemetry
from model.batch import Batch
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage


class TimedModel(FakeModel):
    """The toy model, as slow as a real one: a fixed cost a step and one per row."""

    def __init__(self, step_seconds: float, row_seconds: float) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.row_seconds = row_seconds

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        time.sleep(self.step_seconds + self.row_seconds * len(batch))
        self.forwards.clear()
        return super().forward(batch, storage)


class LocalView:
    """An EngineView on a telemetry in this process."""

    def __init__(self, name: str, telemetry: Telemetry) -> None:
        self.name = name
        self.telemetry = telemetry
        self.asked = 0

    async def news(self, since: int) -> tuple[int, bytes]:
        self.asked += 1
        return self.telemetry.news(since)

    async def history(self, seconds: float) -> list[bytes]:
        return self.telemetry.steps_of_last(seconds)

    async def figures(self) -> list[Metric]:
        self.telemetry.flush()
        return self.telemetry.metrics.families()


class RunningEngine:
    """Steps an engine on a thread while there is work, telling a telemetry."""

    def __init__(
        self,
        name: str,
        *,
        mode: Mode = "chunked",
        slots: int = 16,
        kv_budget: int = 2560,
        step_seconds: float = 0.0,
        row_seconds: float = 0.0,
    ) -> None:
        model = TimedModel(step_seconds, row_seconds)
        executor = ModelExecutor(model, fake_storage(num_slots=slots, max_len=1024, poison=False))
        self.engine = Engine(executor, Fcfs(), mode=mode, max_step_tokens=slots + 48, kv_budget=kv_budget)
        self.info = {"engine": name, "mode": mode, "policy": "fcfs", "slots": slots}
        self.telemetry = Telemetry(StepHistory(name), EngineMetrics(name, {"mode": mode}))
        self.view = LocalView(name, self.telemetry)
        self._lock = threading.Lock()
        self._open: dict[str, engine_request.Request] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, name: str, prompt_len: int, max_tokens: int, tenant: str = "default") -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        prompt = [index % 90 for index in range(prompt_len)]
        request = engine_request.Request(name, prompt, params, tenant=tenant, arrival=time.monotonic())
        with self._lock:
            self.telemetry.on_submit(request)
            self.engine.submit(request)
            self._open[name] = request

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self.telemetry.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.engine.has_work():
                time.sleep(0.005)
                continue
            with self._lock:
                outputs, record = self.engine.step()
            self.telemetry.on_step(record)
            for output in outputs:
                if output.finish_reason is not None:
                    self.telemetry.on_end(self._open.pop(output.request_id))
            time.sleep(0.0005)  # Lets `submit` have the lock.


@dataclass
class ObservedServer:
    url: str
    engines: dict[str, RunningEngine]

    def pids(self) -> list[int]:
        """As a served one's: it lives in this process."""
        return [os.getpid()]


@contextmanager
def observed_server(
    engines: Mapping[str, RunningEngine],
    authorize: Callable[[Mapping[str, str]], object] = lambda headers: None,
    port: int = 0,
) -> Iterator[ObservedServer]:
    """The observing routes on a loopback port; stops the engines at the end."""
    app = FastAPI()
    hello = {"model": "toy", "engines": [running.info for running in engines.values()]}
    observatory = Observatory(
        lambda: {name: running.view for name, running in engines.items()},
        lambda: hello,
        authorize,
        AsyncMock(return_value=[]),
    )
    observatory.install(app)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    bound = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield ObservedServer(f"http://127.0.0.1:{bound}", dict(engines))
    finally:
        server.should_exit = True
        thread.join(timeout=5)
        for running in engines.values():
            running.stop()


def offer_load(running: RunningEngine, requests: int, seed: int = 1) -> None:
    """Heavy-tailed requests of three tenants, all at once."""
    rng = random.Random(seed)
    for index in range(requests):
        prompt_len = min(400, int(rng.lognormvariate(3.2, 0.8)) + 1)
        max_tokens = min(120, int(rng.lognormvariate(3.0, 0.9)) + 2)
        tenant = rng.choice(["atlas", "atlas", "borealis", "cygnus"])
        running.submit(f"chatcmpl-{seed:04x}{index:024x}", prompt_len, max_tokens, tenant)
