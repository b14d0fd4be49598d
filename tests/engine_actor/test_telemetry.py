"""Spans, metrics and the ring, from a real step loop on the toy model."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, StatusCode

from engine_actor.engine import Engine
from engine_actor.metrics import OTHER_TENANTS, TENANT_LABELS, EngineMetrics, exposition
from engine_actor.records import StepRecord
from engine_actor.request import Request
from engine_actor.span_export import SpanSink
from engine_actor.spans import MAX_REQUEST_IDS, parse_context
from engine_actor.step_wire import decode_step, pack_steps, unpack_steps
from engine_actor.telemetry import BACKLOG, Telemetry
from model.batch import Batch
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
INFO = {"version": "1", "mode": "chunked", "policy": "fcfs"}


def facts(item: ReadableSpan | Link | Event | None) -> dict[str, Any]:
    assert item is not None
    return dict(item.attributes or {})


class Watched:
    """An engine whose loop tells a telemetry, as the actor's does, and what came of it."""

    def __init__(self, engine: Engine, **options: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.sink = SpanSink(self.exporter, "memory", Resource({}), interval=0.01)
        self.engine = engine
        self.telemetry = Telemetry(
            "0",
            EngineMetrics("0", INFO, slots=engine.slots.count),
            self.sink,
            policy="fcfs",
            **options,  # type: ignore[arg-type]
        )

    def run(self, requests: list[Request], each_step: Callable[[int], None] = lambda step: None) -> None:
        for request in requests:
            self.telemetry.on_submit(request)
            self.engine.submit(request)
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
        assert self.sink.force_flush(5000)
        return [span for span in self.exporter.get_finished_spans() if span.name != "slotserve.startup"]

    def metric(self, sample: str) -> float:
        text = exposition([self.telemetry.metrics.families()]).decode()
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, f"{sample} is not in\n{text}"
        return float(found[1])


@contextmanager
def watched(engine: Engine, **options: object) -> Iterator[Watched]:
    subject = Watched(engine, **options)
    try:
        yield subject
    finally:
        subject.telemetry.close()
        subject.sink.shutdown()


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


def test_every_step_is_a_trace_with_its_phases_inside() -> None:
    with watched(tight_engine()) as subject:
        records: list[int] = []
        subject.run([request(f"r{i}", 9, 8) for i in range(4)], records.append)
        spans = subject.spans()
    steps = [span for span in spans if span.name == "engine.step"]
    assert [facts(span)["slotserve.step.number"] for span in steps] == records
    for step in steps:
        assert step.context is not None
        assert step.start_time is not None
        assert step.end_time is not None
        assert step.parent is None
        children = [s for s in spans if s.parent and s.parent.span_id == step.context.span_id]
        assert [child.name for child in children] == [
            "engine.admit", *(["engine.decode", "engine.sample"]), "engine.retire"
        ]  # fmt: skip
        for child in children:
            assert child.start_time is not None
            assert child.end_time is not None
            assert child.context is not None
            assert child.context.trace_id == step.context.trace_id
            assert step.start_time <= child.start_time <= child.end_time <= step.end_time
        for phase in ("admit", "decode", "sample", "retire"):
            assert f"slotserve.step.{phase}_us" in (step.attributes or {})
    assert {facts(span)["slotserve.policy"] for span in steps} == {"fcfs"}


def test_a_preempted_requests_stages_follow_each_other_under_the_callers_span() -> None:
    with watched(tight_engine()) as subject:
        requests = [traced(f"r{i}", 9, 16) for i in range(3)]
        subject.run(requests)
        spans = subject.spans()
    step_ids = {
        span.context.span_id: facts(span)["slotserve.step.number"]
        for span in spans
        if span.name == "engine.step" and span.context and span.attributes
    }
    preempted = [item for item in requests if item.num_preemptions]
    assert preempted
    for item in requests:
        stages = [s for s in spans if s.attributes and s.attributes.get("slotserve.request.id") == item.id]
        names = [stage.name for stage in stages]
        assert names[:3] == ["queue", "prefill", "decode"]
        reasons = [facts(s).get("slotserve.preemption.reason") for s in stages if s.name == "preempted"]
        assert reasons == ["kv"] * item.num_preemptions
        assert names.count("prefill") == 1 + item.num_preemptions
        for stage in stages:
            assert stage.context is not None
            assert stage.parent is not None
            assert f"{stage.context.trace_id:032x}" == TRACE
            assert f"{stage.parent.span_id:016x}" == CALLER
        for before, after in itertools.pairwise(stages):
            assert before.end_time == after.start_time
        prefill = stages[1]
        assert prefill.attributes is not None
        assert facts(prefill)["slotserve.prefill.tokens"] == 9
        assert facts(prefill)["slotserve.prefill.chunks"] == len(prefill.events) >= 2
        assert sum(facts(e)["slotserve.chunk.tokens"] for e in prefill.events) == 9
        decoded = sum(facts(s)["slotserve.decode.tokens"] for s in stages if s.name == "decode")
        assert decoded == 16 - names.count("prefill")
        for stage in stages:
            if stage.name in ("queue", "preempted"):
                assert not stage.links
                continue
            roles: list[str] = [role for link in stage.links for role in facts(link)["slotserve.step.role"]]
            assert sorted(roles) == ["first", "last", "slowest"]
            for link in stage.links:
                assert step_ids[link.context.span_id] == facts(link)["slotserve.step.number"]


def test_the_debug_switch_links_every_step() -> None:
    with watched(tight_engine(), link_all_steps=True) as subject:
        subject.run([traced("only", 9, 7)])
        spans = subject.spans()
    [decode] = [span for span in spans if span.name == "decode"]
    assert [facts(link)["slotserve.step.number"] for link in decode.links] == list(range(2, 8))
    assert [facts(link)["slotserve.step.role"] for link in decode.links].count(("ridden",)) <= 5


@pytest.mark.parametrize(
    "context", ["", "garbage", "00-0-0-01", f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01"]
)
def test_a_malformed_traceparent_is_ignored(context: str) -> None:
    assert parse_context({"traceparent": context}) is None
    with watched(tight_engine()) as subject:
        subject.run([request("r", 3, 2, context=context)])
        assert {span.name.split(".")[0] for span in subject.spans()} == {"engine"}
    assert subject.metric('slotserve_requests_total{engine="0",finish_reason="length",tenant="t"}') == 1


def test_a_caller_that_does_not_sample_gets_no_request_spans() -> None:
    with watched(tight_engine()) as subject:
        subject.run([traced("quiet", 3, 2, flags="00"), traced("loud", 3, 2)])
        ids = {(span.attributes or {}).get("slotserve.request.id") for span in subject.spans()}
    assert ids == {None, "loud"}


def test_a_step_names_so_many_requests_and_counts_all() -> None:
    slots = MAX_REQUEST_IDS + 1
    engine = Engine(
        ModelExecutor(FakeModel(), fake_storage(num_slots=slots)), Fcfs(), max_step_tokens=2 * slots
    )
    with watched(engine) as subject:
        subject.run([request(f"r{i}", 1, 1) for i in range(slots)])
        [step] = [span for span in subject.spans() if span.name == "engine.step"]
    assert step.attributes is not None
    assert len(facts(step)["slotserve.step.request_ids"]) == MAX_REQUEST_IDS
    assert facts(step)["slotserve.step.request_count"] == slots


def test_a_failed_step_is_an_error_in_both_trees() -> None:
    engine = tight_engine()
    assert isinstance(engine.executor, ModelExecutor)
    model = engine.executor.model
    with watched(engine) as subject:
        model.forward = lambda batch, kv: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        subject.run([traced("bad", 3, 2)])
        failed = {span.name for span in subject.spans() if span.status.status_code is StatusCode.ERROR}
        assert failed == {"engine.step", "prefill"}
        assert subject.metric('slotserve_step_errors_total{engine="0"}') == 1
        assert subject.metric('slotserve_requests_total{engine="0",finish_reason="error",tenant="t"}') == 1


class NaNs(FakeModel):
    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        return super().forward(batch, storage) * math.nan


def test_what_failed_has_produced_no_token() -> None:
    with watched(Engine(ModelExecutor(NaNs(), fake_storage()), Fcfs())) as subject:
        subject.run([request("bad", 3, 2)])
        text = exposition([subject.telemetry.metrics.families()]).decode()
        assert "slotserve_output_tokens_total{" not in text
        assert "slotserve_time_to_first_token_seconds_count{" not in text
        assert subject.metric('slotserve_step_errors_total{engine="0"}') == 1


def test_steps_that_nobody_looked_at_leave_the_count_of_the_waiting_right() -> None:
    """The records of an admission and of a preemption are lost, each once."""
    with watched(tight_engine()) as subject:
        lost: set[str] = set()
        on_step = subject.telemetry.on_step

        def lossy(record: StepRecord) -> None:
            changes = {"admission"} if record.admitted else set()
            changes |= {"preemption"} if record.preempted else set()
            if changes <= lost:
                on_step(record)
            lost.update(changes)

        subject.telemetry.on_step = lossy  # type: ignore[method-assign]
        subject.run([request(f"r{i}", 9, 16) for i in range(3)])
        assert lost == {"admission", "preemption"}
        assert subject.telemetry.waiting() == {}


def test_metrics_count_what_happened() -> None:
    now = [100.0]
    engine = Engine(
        ModelExecutor(FakeModel(), fake_storage(num_slots=2)),
        Fcfs(),
        max_step_tokens=64,
        clock=lambda: now[0],
    )  # fmt: skip

    def tick(step: int) -> None:
        now[0] += 1.0

    with watched(engine) as subject:
        requests = [request("a", 5, 4, "x"), request("b", 5, 4, "x"), request("c", 5, 2, "y")]
        for item in requests:
            item.arrival = 98.0
        subject.run(requests, tick)
        label = 'engine="0",tenant="x"'
        assert subject.metric(f"slotserve_prompt_tokens_total{{{label}}}") == 10
        assert subject.metric(f"slotserve_output_tokens_total{{{label}}}") == 8
        assert subject.metric('slotserve_requests_total{engine="0",finish_reason="length",tenant="x"}') == 2
        # a and b: first token in the step at 100, then one a second; c waits 4 s for a slot.
        assert subject.metric(f"slotserve_time_to_first_token_seconds_count{{{label}}}") == 2
        assert subject.metric(f"slotserve_time_to_first_token_seconds_sum{{{label}}}") == pytest.approx(
            4, abs=0.1
        )
        assert subject.metric(f"slotserve_inter_token_latency_seconds_count{{{label}}}") == 6
        assert subject.metric(f"slotserve_inter_token_latency_seconds_sum{{{label}}}") == pytest.approx(
            6, abs=0.3
        )
        assert subject.metric('slotserve_queue_seconds_sum{engine="0",tenant="y"}') == 4
        assert subject.metric('slotserve_request_seconds_sum{engine="0",tenant="y"}') == pytest.approx(
            7, abs=0.1
        )
        assert subject.metric('slotserve_steps_total{engine="0"}') == 6
        assert subject.metric('slotserve_step_seconds_count{engine="0"}') == 6
        assert subject.metric('slotserve_step_phase_seconds_count{engine="0",phase="decode"}') == 6
        assert subject.metric('slotserve_slots_free{engine="0"}') == 2
        assert subject.metric('slotserve_slots{engine="0"}') == 2
        assert subject.metric('slotserve_kv_budget_tokens{engine="0"}') == 128
        assert (
            subject.metric('slotserve_engine_info{engine="0",mode="chunked",policy="fcfs",version="1"}') == 1
        )


def test_a_resumed_request_waited_since_its_last_token_and_its_prompt_is_counted_already() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs(), clock=lambda: 100.0)
    with watched(engine) as subject:
        resumed = request("r", 5, 4)
        resumed = replace(resumed, arrival=80.0, resumed=[1, 2], last_token=97.0)
        ahead = replace(resumed, id="ahead", last_token=101.0)
        subject.run([resumed, ahead])
        label = 'engine="0",tenant="t"'
        assert subject.metric(f"slotserve_output_tokens_total{{{label}}}") == 4
        assert subject.metric(f"slotserve_inter_token_latency_seconds_count{{{label}}}") == 4
        waited = subject.metric(f"slotserve_inter_token_latency_seconds_sum{{{label}}}")
        assert waited == pytest.approx(3, abs=0.3)
        text = exposition([subject.telemetry.metrics.families()]).decode()
        assert f"slotserve_time_to_first_token_seconds_count{{{label}}}" not in text
        assert f"slotserve_prompt_tokens_total{{{label}}}" not in text


def test_preemptions_recompute_and_aborts_are_counted() -> None:
    with watched(tight_engine()) as subject:
        requests = [request(f"r{i}", 9, 16) for i in range(3)]
        subject.run(requests)
        assert subject.metric('slotserve_preemptions_total{engine="0",reason="kv"}') == sum(
            item.num_preemptions for item in requests
        )
        assert subject.metric('slotserve_recomputed_tokens_total{engine="0"}') == sum(
            item.recomputed_tokens for item in requests
        )
        late = request("late", 3, 3)
        subject.telemetry.on_submit(late)
        subject.engine.submit(late)
        subject.engine.abort("late")
        subject.telemetry.on_end(late)
        subject.telemetry.flush()
        assert subject.metric('slotserve_aborts_total{engine="0",tenant="t"}') == 1
        assert subject.telemetry.waiting() == {}


def test_an_engine_that_has_not_stepped_shows_free_slots() -> None:
    text = exposition([EngineMetrics("0", INFO, slots=4).families()]).decode()
    assert 'slotserve_slots_free{engine="0"} 4.0' in text
    assert 'slotserve_requests_running{engine="0"} 0.0' in text


def test_tenant_labels_are_bounded() -> None:
    metrics = EngineMetrics("0", INFO)
    assert [metrics.tenant(f"t{i}") for i in range(TENANT_LABELS)] == [f"t{i}" for i in range(TENANT_LABELS)]
    assert metrics.tenant("one too many") == OTHER_TENANTS
    assert metrics.tenant("t0") == "t0"
    for waiting in ({"one too many": 5}, {}):
        metrics.gauge_all(None, waiting)
        sample = f'slotserve_requests_waiting{{engine="0",tenant="{OTHER_TENANTS}"}} {sum(waiting.values())}'
        assert sample in exposition([metrics.families()]).decode()


def test_two_engines_make_one_page_with_each_family_once() -> None:
    pages = [EngineMetrics(str(engine), INFO) for engine in range(2)]
    for page in pages:
        page.steps.inc(3)
    text = exposition([page.families() for page in pages]).decode()
    assert text.count("# TYPE slotserve_steps_total counter") == 1
    assert 'slotserve_steps_total{engine="0"} 3.0' in text
    assert 'slotserve_steps_total{engine="1"} 3.0' in text
    assert "_created" not in text


def test_every_figure_is_mirrored() -> None:
    seen: dict[str, list[tuple[float, dict[str, str]]]] = {}

    class Mirrored:
        def __init__(
            self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: object = None
        ) -> None:
            self.values = seen.setdefault(name, [])

        def inc(self, value: float, tags: dict[str, str]) -> None:
            self.values.append((value, tags))

        set = observe = inc

    class Mirror:
        Counter = Gauge = Histogram = Mirrored

    metrics = EngineMetrics("3", INFO, Mirror())
    metrics.output_tokens.inc(2, tenant="t")
    metrics.ttft.observe(0.5, tenant="t")
    assert seen["slotserve_output_tokens_total"] == [(2, {"engine": "3", "tenant": "t"})]
    assert seen["slotserve_time_to_first_token_seconds"] == [(0.5, {"engine": "3", "tenant": "t"})]
    own = {sample.name for family in metrics.families() for sample in family.samples}
    assert {"slotserve_output_tokens_total", "slotserve_time_to_first_token_seconds_sum"} <= own


def test_the_ring_keeps_the_last_steps_within_so_many_bytes_and_tells_who_waits() -> None:
    with watched(tight_engine(), history_bytes=5000) as subject:
        requests = [request(f"r{i}", 9, 8, f"tenant-{i % 2}") for i in range(4)]
        subject.run(requests)
        telemetry = subject.telemetry
        lines = telemetry.steps_of_last(60)
        last, _ = telemetry.steps_since(-1, 1)
        numbers = [decode_step(line).number for line in lines]
        assert numbers == list(range(last - len(lines) + 1, last + 1))
        assert numbers[0] > 0
        assert 5000 - 2 * max(map(len, lines)) < sum(map(len, lines)) <= 5000
        assert unpack_steps(pack_steps(lines)) == lines
        assert unpack_steps(pack_steps([])) == []
        newest, news = telemetry.steps_since(last - 2, 10)
        assert (newest, [json.loads(line)["number"] for line in news]) == (last, [last - 1, last])
        assert len(telemetry.steps_since(-1, 3)[1]) == 3
        assert telemetry.steps_since(last, 3) == (last, [])
        assert telemetry.news(last)[0] == last
        assert telemetry.steps_of_last(0) == []
        assert json.loads(lines[-1])["queue"] == {}
    with watched(tight_engine()) as subject:
        subject.run([request(f"r{i}", 9, 8, f"tenant-{i % 2}") for i in range(4)])
        parsed = [json.loads(line) for line in subject.telemetry.steps_of_last(60)]
    assert {entry[0] for step in parsed for entry in step["arrived"]} == {"r0", "r1", "r2", "r3"}
    assert all(sum(step["queue"].values()) == step["waiting"] for step in parsed)
    # The last ending comes after the last step, and waits for the next one.
    assert [entry[:2] for step in parsed for entry in step["ended"]] == [
        [f"r{i}", "length"] for i in range(3)
    ]


def test_old_steps_leave_the_ring_by_age() -> None:
    with watched(tight_engine(), history_seconds=0.0) as subject:
        subject.run([request("r", 3, 5)])
        assert len(subject.telemetry.steps_of_last(60)) == 1


def test_a_backlog_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs())) as subject:
        subject.engine.submit(request("r", 1, 1))
        _, record = subject.engine.step()
        with subject.telemetry._seen:  # Nobody looks.
            for _ in range(BACKLOG):
                subject.telemetry.on_step(record)
            before = subject.telemetry._dropped
            subject.telemetry.on_step(record)
            assert (before, subject.telemetry._dropped) == (0, 1)
            count = subject.telemetry.metrics.records_dropped.inc

            def count_while_one_more_is_dropped(value: float) -> None:
                subject.telemetry.on_step(record)
                count(value)

            monkeypatch.setattr(
                subject.telemetry.metrics.records_dropped, "inc", count_while_one_more_is_dropped
            )
            subject.telemetry._refresh()
            monkeypatch.undo()
            subject.telemetry._refresh()
        subject.telemetry.flush()
        assert subject.metric('slotserve_records_dropped_total{engine="0"}') == 2
        assert subject.metric('slotserve_steps_total{engine="0"}') == BACKLOG
