"""The step thread and the actor around it: idle costs nothing, failures are loud, figures add up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine_actor import actor
from engine_actor.actor import EngineActor
from engine_actor.engine import Engine
from engine_actor.history import StepHistory
from engine_actor.messages import EngineInfo, EngineStatus, Frame
from engine_actor.metrics import EngineMetrics
from engine_actor.records import Occupancy, StepRecord
from engine_actor.request import Output, Request
from engine_actor.scheduler import Mode
from engine_actor.span_export import SpanSink
from engine_actor.spans import SpanRecorder
from engine_actor.step_loop import MAX_FAILED_STEPS, StepLoop
from engine_actor.step_wire import decode_step, unpack_steps
from engine_actor.telemetry import Telemetry
from model.batch import Batch
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.fakes import VOCAB, FakeModel, fake_storage, fake_telemetry

INFO = EngineInfo("a toy", VOCAB, 64, 64, True, "fp_toy", 2, "chunked", "fcfs")


class Recorder:
    """An observer that remembers, and the sink of a bare StepLoop."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.ended: list[str] = []
        self.steps: list[int] = []
        self.frames: list[tuple[dict[str, Frame], EngineStatus]] = []
        self.errors: list[BaseException] = []
        self.ready = threading.Event()
        self.failed = threading.Event()

    def on_start(self, occupancy: Callable[[], Occupancy]) -> None:
        pass

    def on_submit(self, request: Request) -> None:
        self.submitted.append(request.id)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record.number)

    def on_end(self, request: Request) -> None:
        self.ended.append(request.id)
        raise RuntimeError("an observer's own trouble")

    def deliver(self, frames: dict[str, Frame], status: EngineStatus) -> None:
        self.frames.append((frames, status))

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.failed.set()

    def outputs(self, replica: str) -> list[Output]:
        return [
            output for frames, _ in self.frames if replica in frames for output in frames[replica].outputs
        ]


def start(
    recorder: Recorder, model: FakeModel, max_waiting: int = 10, slots: int = 2, mode: Mode = "chunked"
) -> StepLoop:
    def build() -> tuple[Engine, EngineInfo]:
        return Engine(ModelExecutor(model, fake_storage(num_slots=slots)), Fcfs(), mode=mode), INFO

    loop = StepLoop(
        build,
        max_waiting=max_waiting,
        ready=lambda info: recorder.ready.set(),
        deliver=recorder.deliver,
        fail=recorder.fail,
        observers=[recorder],
    )
    loop.start()
    assert recorder.ready.wait(5)
    return loop


def request(name: str, max_tokens: int = 5) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, temperature=0))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_step_is_one_delivery_with_every_replicas_share() -> None:
    recorder = Recorder()
    loop = start(recorder, FakeModel())
    loop.submit("left", [request("a"), request("b")])
    loop.submit("right", [request("c", 3)])
    until(lambda: sorted(recorder.ended) == ["a", "b", "c"])
    loop.stop()
    loop.join(5)
    assert sorted(recorder.submitted) == ["a", "b", "c"]
    assert {o.request_id for o in recorder.outputs("left")} == {"a", "b"}
    assert [o.index for o in recorder.outputs("right")] == [0, 1, 2]
    with_tokens = [frames for frames, _ in recorder.frames if frames]
    assert len(with_tokens) == len(recorder.steps)
    last = recorder.frames[-1][1]
    assert (last.waiting, last.running, last.free_kv) == (0, 0, 128)
    assert not recorder.errors


def test_an_idle_loop_burns_no_cpu_and_wakes_at_once() -> None:
    recorder = Recorder()
    loop = start(recorder, FakeModel())
    loop.submit("replica", [request("a", 1)])
    until(lambda: recorder.ended == ["a"])
    assert loop.ident is not None
    its_cpu = time.pthread_getcpuclockid(loop.ident)
    before = time.clock_gettime(its_cpu)
    time.sleep(0.5)
    assert time.clock_gettime(its_cpu) - before < 0.02
    assert loop.status().stalled == 0
    loop.submit("replica", [request("b", 1)])
    until(lambda: recorder.ended == ["a", "b"])
    loop.stop()


def test_time_without_work_is_no_stall() -> None:
    class Held(FakeModel):
        def forward(self, *args: object) -> object:  # type: ignore[override]
            held.wait(5)
            return super().forward(*args)  # type: ignore[arg-type]

    held = threading.Event()
    recorder = Recorder()
    loop = start(recorder, Held())
    loop._roused -= 3600
    assert loop.status().stalled == 0
    with loop._wake:
        # The step thread has not even seen it yet.
        loop.submit("replica", [request("a", 1)])
        assert loop.status().stalled < 60
    until(lambda: loop.status().stalled > 0.05)
    held.set()
    until(lambda: recorder.ended == ["a"])
    loop.stop()


def test_a_request_that_can_never_run_is_answered_and_forgotten() -> None:
    recorder = Recorder()
    loop = start(recorder, FakeModel())
    loop.submit("replica", [request("huge", 1000)])
    until(lambda: recorder.ended == ["huge"])
    loop.stop()
    loop.join(5)
    (refusal,) = recorder.outputs("replica")
    assert refusal.finish_reason == "error"
    assert "64 tokens" in (refusal.error or "")
    assert loop._accepted == 0


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on() -> None:
    recorder = Recorder()
    loop = start(recorder, FakeModel())
    loop.submit("first", [request("a"), request("b", 2)])
    loop.submit("second", [request("a"), request("b")])
    until(lambda: not loop._accepted)
    loop.stop()
    loop.join(5)
    assert [(o.request_id, o.finish_reason) for o in recorder.outputs("second")] == [
        ("a", "error"),
        ("b", "error"),
    ]
    assert [o.index for o in recorder.outputs("first") if o.request_id == "a"] == list(range(5))
    assert sorted(recorder.submitted) == sorted(recorder.ended) == ["a", "b"]
    assert not recorder.errors


def test_replicas_that_leave_take_their_requests_and_only_theirs_along() -> None:
    class Slow(FakeModel):
        def forward(self, *args: object) -> object:  # type: ignore[override]
            time.sleep(0.01)
            return super().forward(*args)  # type: ignore[arg-type]

    recorder = Recorder()
    loop = start(recorder, Slow())
    loop.submit("gone", [request("a", 60)])
    loop.submit("stays", [request("b", 20)])
    until(lambda: loop.status().running == 2)
    loop.release("gone")
    loop.submit("gone", [request("back again", 2)])
    # A request ends just before its last output is handed over.
    until(lambda: len(recorder.ended) == 3 and loop.status().running == 0 and not loop._accepted)
    loop.stop()
    loop.join(5)
    assert recorder.ended[0] == "a"
    assert [o.index for o in recorder.outputs("stays")] == list(range(20))
    assert recorder.outputs("gone")[-1].request_id == "back again"


def test_steps_that_keep_failing_end_the_loop_with_their_error() -> None:
    class Broken(FakeModel):
        def forward(self, *args: object) -> object:  # type: ignore[override]
            raise ValueError("the device is gone")

    recorder = Recorder()
    loop = start(recorder, Broken())
    for i in range(MAX_FAILED_STEPS):
        assert not recorder.failed.is_set()
        loop.submit("replica", [request(f"r{i}")])
        until(lambda count=i + 1: len(recorder.ended) == count)  # type: ignore[misc]
    assert recorder.failed.wait(5)
    loop.join(5)
    assert "3 steps in a row" in str(recorder.errors[0])
    assert all("the device is gone" in (o.error or "") for o in recorder.outputs("replica"))


def test_a_step_that_works_clears_the_count_of_failures() -> None:
    class Moody(FakeModel):
        calls = 0

        def forward(self, *args: object) -> object:  # type: ignore[override]
            self.calls += 1
            if self.calls % 2:
                raise ValueError("not now")
            return super().forward(*args)  # type: ignore[arg-type]

    recorder = Recorder()
    loop = start(recorder, Moody())
    for i in range(3 * MAX_FAILED_STEPS):
        loop.submit("replica", [request(f"r{i}", 1)])
        until(lambda count=i + 1: len(recorder.ended) == count)  # type: ignore[misc]
    assert not recorder.failed.is_set()
    loop.stop()


def actor_scenario(
    work: Callable[[EngineActor], Awaitable[None]], model: FakeModel | None = None, stall_seconds: float = 60
) -> None:
    async def main() -> None:
        engine = EngineActor(
            "engine-0",
            lambda: (
                Engine(ModelExecutor(model or FakeModel(), fake_storage(num_slots=2)), Fcfs()),
                INFO,
            ),
            10,
            stall_seconds,
            fake_telemetry,
        )
        assert await engine.ready() == INFO
        try:
            await work(engine)
        finally:
            engine._steps.stop()
            engine._steps.join(5)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_replica_that_is_not_attached_may_not_submit() -> None:
    async def work(engine: EngineActor) -> None:
        with pytest.raises(LookupError, match="not attached"):
            await engine.submit("stranger", [request("a")])

    actor_scenario(work)


def test_other_replicas_learn_how_busy_the_engine_is() -> None:
    async def work(engine: EngineActor) -> None:
        busy, idle = engine.frames("busy"), engine.frames("idle")
        assert (await anext(busy)).status.free_kv == 128
        await anext(idle)
        await engine.submit("busy", [request("a")])
        collected = [await anext(busy) for _ in range(5)]
        assert [frame.outputs[0].index for frame in collected] == list(range(5))
        frame = await anext(idle)
        assert frame.outputs == ()
        await engine.detach("busy")
        assert [frame async for frame in busy] == []

    actor_scenario(work)


def test_past_steps_come_as_one_message() -> None:
    async def work(engine: EngineActor) -> None:
        stream = engine.frames("replica")
        await anext(stream)
        await engine.submit("replica", [request("a")])
        frames = [await anext(stream) for _ in range(5)]
        steps = unpack_steps(await engine.history(60))
        assert [decode_step(step).number for step in steps] == list(range(frames[-1].status.steps))
        assert unpack_steps(await engine.history(0)) == []

    actor_scenario(work)


def test_an_engine_whose_step_does_not_end_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LEASE_SECONDS", 0.1)

    class Hung(FakeModel):
        def forward(self, *args: object) -> object:  # type: ignore[override]
            end.wait(10)
            return super().forward(*args)  # type: ignore[arg-type]

    end = threading.Event()

    async def work(engine: EngineActor) -> None:
        gave_up: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(engine, "_give_up", lambda e: None if gave_up.done() else gave_up.set_result(e))
        await anext(engine.frames("replica"))
        # Idle for longer than the limit: that is no stall.
        await asyncio.sleep(0.3)
        assert not gave_up.done()
        engine._steps.submit("replica", [request("a", 1)])
        try:
            assert "no forward has ended" in str(await gave_up)
        finally:
            end.set()

    actor_scenario(work, Hung(), stall_seconds=0.2)


def test_an_engine_that_gives_up_exports_the_step_it_dies_in_before_it_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DeviceGoneError(BaseException):
        """No request is to blame."""

    class Dead(FakeModel):
        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            raise DeviceGoneError

    exporter = InMemorySpanExporter()
    exported_at_exit: list[set[tuple[str, StatusCode]]] = []

    def leave(code: int) -> None:
        spans = exporter.get_finished_spans()
        exported_at_exit.append({(span.name, span.status.status_code) for span in spans})

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("logging.shutdown", lambda: None)

    def telemetry() -> Telemetry:
        spans = SpanRecorder("0", SpanSink(exporter, "memory", Resource({})), policy="fcfs")
        return Telemetry(StepHistory("0"), EngineMetrics("0", {}), spans)

    async def work() -> None:
        engine = EngineActor(
            "engine",
            lambda: (Engine(ModelExecutor(Dead(), fake_storage()), Fcfs()), INFO),
            10,
            60.0,
            telemetry,
        )
        await engine.ready()
        engine._steps.submit("replica", [request("a")])
        while not exported_at_exit:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 10))
    assert ("engine.step", StatusCode.ERROR) in exported_at_exit[0]
    assert ("engine.decode", StatusCode.UNSET) in exported_at_exit[0]


def test_a_long_step_of_many_forwards_is_no_stall() -> None:
    """In mode `separate` a step holds the prompts of all who were admitted in it."""

    class Slow(FakeModel):
        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            longest.append(loop.status().stalled)
            time.sleep(0.1)
            return super().forward(batch, storage)

    longest: list[float] = []
    recorder = Recorder()
    loop = start(recorder, Slow(), slots=6, mode="separate")
    loop.submit("replica", [request(f"r{i}", 1) for i in range(6)])
    until(lambda: len(recorder.ended) == 6)
    loop.stop()
    assert recorder.steps == [0]
    assert max(longest) < 0.3


def test_one_request_that_always_fails_is_no_reason_to_give_up() -> None:
    class Picky(FakeModel):
        def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
            if 11 in batch.tokens:
                raise ValueError("11 is not to be said")
            return super().forward(batch, storage)

    recorder = Recorder()
    loop = start(recorder, Picky())
    with loop._wake:
        loop.submit("replica", [request("long", 40)])
        loop.submit("replica", [replace(request(f"bad{i}"), prompt=[11]) for i in range(8)])
    until(lambda: len(recorder.ended) == 9)
    assert not recorder.failed.is_set()
    assert recorder.outputs("replica")[-1].request_id == "long"
    loop.stop()


def test_the_reader_that_stops_reading_releases_what_it_submitted() -> None:
    async def work(engine: EngineActor) -> None:
        stream = engine.frames("replica")
        await anext(stream)
        await engine.submit("replica", [request("a", 60)])
        await anext(stream)
        await stream.aclose()
        while engine._steps._accepted:
            await asyncio.sleep(0.01)
        assert engine._replicas == {}

    actor_scenario(work)
