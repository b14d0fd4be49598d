"""The thread that tells: how much may wait, what holds while nothing steps, what a dying engine leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from opentelemetry.trace import StatusCode

from engine_actor import telemetry as telemetry_module
from engine_actor.engine import Engine
from engine_actor.history import StepHistory
from engine_actor.messages import EngineInfo
from engine_actor.metrics import EngineMetrics, exposition
from engine_actor.step_loop import StepLoop
from engine_actor.telemetry import BACKLOG, Telemetry
from model.batch import Batch
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.engine_actor.watched import TRACE, Watched, request, tight_engine, traced, watched
from tests.fakes import VOCAB, FakeModel, fake_storage

GAUGES = ("requests_running", "slots_free", "kv_tokens")


def test_a_backlog_is_bounded_and_counted() -> None:
    with watched(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs())) as subject:
        subject.engine.submit(request("r", 1, 1))
        _, record = subject.engine.step()
        with subject.telemetry._seen:  # Nobody looks.
            for _ in range(BACKLOG + 2):
                subject.telemetry.on_step(record)
        assert subject.metric('slotserve_records_dropped_total{engine="0"}') == 2
        assert subject.metric('slotserve_steps_total{engine="0"}') == BACKLOG


def gauges(telemetry: Telemetry) -> tuple[float, ...]:
    samples = {s.name: s.value for family in telemetry.figures() for s in family.samples}
    return tuple(samples[f"slotserve_{name}"] for name in GAUGES)


def test_gauges_are_true_while_nothing_steps() -> None:
    """Before the first step, in the middle, and after the last running request has been dropped."""
    with watched(tight_engine()) as subject:
        assert gauges(subject.telemetry) == (0, 4, 0)
        requests = [request("a", 4, 20), request("b", 4, 20)]
        for item in requests:
            subject.submit(item)
        for _ in range(3):
            subject.telemetry.on_step(subject.engine.step()[1])
        running, free, tokens = gauges(subject.telemetry)
        assert (running, free) == (2, 2)
        assert tokens > 8
        subject.abort(requests[0])
        assert gauges(subject.telemetry)[:2] == (1, 3)
        subject.abort(requests[1])
        assert gauges(subject.telemetry) == (0, 4, 0)


def test_a_served_engine_whose_last_client_hangs_up_shows_free_slots() -> None:
    ready, stepped = threading.Event(), threading.Event()
    model = FakeModel()

    def build() -> tuple[Engine, EngineInfo]:
        info = EngineInfo("a toy", VOCAB, 64, 64, True, "fp_toy", 2, "chunked", "fcfs")
        return Engine(ModelExecutor(model, fake_storage(num_slots=2)), Fcfs()), info

    telemetry = Telemetry(StepHistory("0"), EngineMetrics("0", {}))
    loop = StepLoop(
        build,
        max_waiting=9,
        ready=lambda info: ready.set(),
        deliver=lambda frames, status: stepped.set() if frames else None,
        fail=lambda error: None,
        observers=[telemetry],
    )
    loop.start()
    assert ready.wait(10)
    loop.submit("replica", [request("r", 3, 50)])
    assert stepped.wait(10)
    loop.release("replica")
    deadline = time.monotonic() + 10
    while loop.status().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gauges(telemetry) == (0, 2, 0)
    loop.stop()
    telemetry.close()


def test_every_sample_is_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "MIRROR_SECONDS", 0.01)
    seen: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.labels = name, set(tag_keys)

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self.labels
            seen[self.name, tuple(sorted(tags.items()))] = value

    with watched(tight_engine(), mirror=Gauge) as subject:
        subject.run([request(f"r{i}", 9, 8) for i in range(3)])
    families = subject.telemetry.figures()
    own = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    seen["slotserve_spans_exported_total", (("engine", "0"),)] = subject.sink.exported  # The last ones to go.
    assert seen == own
    assert own["slotserve_output_tokens_total", (("engine", "0"), ("tenant", "t"))] == 24


def dies(engine: Engine, in_step: int, how: Callable[[], None]) -> None:
    """Let a forward end in something that no request is to blame for."""
    model = engine.executor.model  # type: ignore[attr-defined]
    forward = model.forward

    def forward_or_die(batch: Batch, storage: SlotStorage) -> object:
        if engine.steps > in_step:
            how()
        return forward(batch, storage)

    model.forward = forward_or_die


def left_behind(subject: Watched) -> dict[str, list[int]]:
    """The spans of errors: by name, the step or the tokens they tell of."""
    subject.telemetry.close(subject.engine.unfinished())
    found: dict[str, list[int]] = {}
    for span in subject.exported():
        if span.status.status_code is StatusCode.ERROR:
            facts = dict(span.attributes or {})
            number = facts.get("slotserve.step.number", facts.get("slotserve.decode.tokens", -1))
            found.setdefault(span.name, []).append(int(str(number)))
    return found


def test_the_step_that_kills_an_engine_is_told_of_with_its_requests() -> None:
    subject = Watched(tight_engine())

    def die() -> None:
        raise SystemExit("the device is gone")

    dies(subject.engine, in_step=3, how=die)
    with pytest.raises(SystemExit):
        subject.run([traced("r", 3, 9)])
    assert left_behind(subject) == {"engine.step": [3], "decode": [2]}
    [step] = [s for s in subject.exported() if s.status.status_code is StatusCode.ERROR and not s.parent]
    assert dict(step.attributes or {})["slotserve.step.request_ids"] == ["r"]
    [decode] = [s for s in subject.exported() if s.name == "decode"]
    assert step.context in [link.context for link in decode.links]
    assert decode.context is not None
    assert f"{decode.context.trace_id:032x}" == TRACE


def test_a_step_that_does_not_end_is_told_of_too() -> None:
    subject = Watched(tight_engine())
    stuck, over = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        over.wait(10)

    dies(subject.engine, in_step=0, how=hang)
    subject.submit(traced("r", 3, 9))
    thread = threading.Thread(target=subject.engine.step)
    thread.start()
    assert stuck.wait(10)
    assert left_behind(subject) == {"engine.step": [0], "prefill": [-1]}
    over.set()
    thread.join()


def test_a_dying_engine_waits_only_so_long_for_a_collector_that_hangs() -> None:
    subject = Watched(tight_engine())
    subject.spans()
    hung = threading.Event()

    def export(spans: object) -> None:
        hung.wait(10)

    subject.exporter.export = export  # type: ignore[method-assign, assignment]
    subject.run([traced("r", 3, 9)])
    started = time.monotonic()
    subject.telemetry.close(seconds=0.3)
    assert time.monotonic() - started < 2
    hung.set()


def test_an_engine_that_is_not_built_yet_has_figures() -> None:
    text = exposition([Telemetry(StepHistory("0"), EngineMetrics("0", {"mode": "m"})).figures()]).decode()
    assert 'slotserve_engine_info{engine="0",mode="m"} 1.0' in text
    assert 'slotserve_steps_total{engine="0"} 0.0' in text
