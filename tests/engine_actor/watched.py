"""An engine on the toy model whose loop tells a telemetry, as the actor's does, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_actor.engine import Engine
from engine_actor.history import HISTORY_BYTES, HISTORY_SECONDS, StepHistory
from engine_actor.metrics import EngineMetrics, exposition
from engine_actor.request import Request
from engine_actor.span_export import STARTUP_SPAN, SpanSink
from engine_actor.spans import SpanRecorder
from engine_actor.telemetry import MakeGauge, Telemetry
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
INFO = {"version": "1", "mode": "chunked", "policy": "fcfs"}


class Watched:
    def __init__(
        self,
        engine: Engine,
        *,
        link_all_steps: bool = False,
        history_bytes: int = HISTORY_BYTES,
        history_seconds: float = HISTORY_SECONDS,
        mirror: MakeGauge | None = None,
    ) -> None:
        self.exporter = InMemorySpanExporter()
        self.sink = SpanSink(self.exporter, "memory", Resource({}), interval=0.01)
        self.engine = engine
        self.telemetry = Telemetry(
            StepHistory("0", max_bytes=history_bytes, max_seconds=history_seconds),
            EngineMetrics("0", INFO),
            SpanRecorder("0", self.sink, policy="fcfs", link_all_steps=link_all_steps),
            mirror=mirror,
        )
        self.telemetry.on_start(engine.occupancy)

    def submit(self, request: Request) -> None:
        self.telemetry.on_submit(request)
        self.engine.submit(request)

    def abort(self, request: Request) -> None:
        self.engine.abort(request.id)
        self.telemetry.on_end(request)

    def run(self, requests: list[Request], each_step: Callable[[int], None] = lambda step: None) -> None:
        for request in requests:
            self.submit(request)
        open_requests = {request.id: request for request in requests}
        while self.engine.has_work():
            outputs, record = self.engine.step()
            self.telemetry.on_step(record)
            for output in outputs:
                if output.finish_reason is not None:
                    self.telemetry.on_end(open_requests.pop(output.request_id))
            each_step(record.number)
        self.telemetry.flush()

    def spans(self) -> list[ReadableSpan]:
        self.telemetry.flush()
        assert self.sink.force_flush(5000)
        return self.exported()

    def exported(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name != STARTUP_SPAN]

    def metric(self, sample: str) -> float:
        text = exposition([self.telemetry.figures()]).decode()
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, f"{sample} is not in\n{text}"
        return float(found[1])


@contextmanager
def watched(
    engine: Engine,
    *,
    link_all_steps: bool = False,
    history_bytes: int = HISTORY_BYTES,
    history_seconds: float = HISTORY_SECONDS,
    mirror: MakeGauge | None = None,
) -> Iterator[Watched]:
    subject = Watched(
        engine,
        link_all_steps=link_all_steps,
        history_bytes=history_bytes,
        history_seconds=history_seconds,
        mirror=mirror,
    )
    try:
        yield subject
    finally:
        subject.telemetry.close()


def request(
    name: str, prompt_len: int, max_tokens: int, tenant: str = "t", context: str | None = None
) -> Request:
    prompt = [(index * 7 + len(name)) % 90 for index in range(prompt_len)]
    carrier = {"traceparent": context} if context else {}
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, prompt, params, tenant=tenant, trace_context=carrier)


def traced(name: str, prompt_len: int, max_tokens: int, flags: str = "01") -> Request:
    return request(name, prompt_len, max_tokens, context=f"00-{TRACE}-{CALLER}-{flags}")


def tight_engine() -> Engine:
    """Chunks of at most a few tokens, and KV for about two of the requests below at once."""
    return Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs(), max_step_tokens=6, kv_budget=36)
