"""Spans of steps and requests, from a real step loop on the toy model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, StatusCode

from engine_actor.engine import Engine
from engine_actor.spans import MAX_REQUEST_IDS, parse_context
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.engine_actor.watched import CALLER, TRACE, request, tight_engine, traced, watched
from tests.fakes import FakeModel, fake_storage


def facts(item: ReadableSpan | Link | Event | None) -> dict[str, Any]:
    assert item is not None
    return dict(item.attributes or {})


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


def test_steps_that_serve_nobody_sampled_have_no_spans() -> None:
    with watched(tight_engine()) as subject:
        subject.run([traced("quiet", 3, 2, flags="00")])
        assert subject.spans() == []
        subject.run([traced("hushed", 3, 9, flags="00"), traced("loud", 3, 2)])
        steps = [facts(span) for span in subject.spans() if span.name == "engine.step"]
    assert [step["slotserve.step.request_ids"] for step in steps] == [["hushed", "loud"]] * 2


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
