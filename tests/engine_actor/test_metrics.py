"""Figures from a real step loop on the toy model, and their exposition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine_actor.engine import Engine
from engine_actor.metrics import OTHER_TENANTS, TENANT_LABELS, EngineMetrics, exposition
from model.batch import Batch
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.fcfs import Fcfs
from tests.engine_actor.watched import INFO, request, tight_engine, watched
from tests.fakes import FakeModel, fake_storage


class NaNs(FakeModel):
    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        return super().forward(batch, storage) * math.nan


def test_what_failed_has_produced_no_token() -> None:
    with watched(Engine(ModelExecutor(NaNs(), fake_storage()), Fcfs())) as subject:
        subject.run([request("bad", 3, 2)])
        text = exposition([subject.telemetry.figures()]).decode()
        assert "slotserve_output_tokens_total{" not in text
        assert "slotserve_time_to_first_token_seconds_count{" not in text
        assert subject.metric('slotserve_step_errors_total{engine="0"}') == 1


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
        text = exposition([subject.telemetry.figures()]).decode()
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
        assert subject.telemetry.history.waiting() == {}


def test_tenant_labels_are_bounded() -> None:
    metrics = EngineMetrics("0", INFO)
    assert [metrics.tenant(f"t{i}") for i in range(TENANT_LABELS)] == [f"t{i}" for i in range(TENANT_LABELS)]
    assert metrics.tenant("one too many") == OTHER_TENANTS
    assert metrics.tenant("t0") == "t0"
    for waiting in ({"one too many": 5}, {}):
        metrics.gauge(None, waiting)
        sample = f'slotserve_requests_waiting{{engine="0",tenant="{OTHER_TENANTS}"}} {sum(waiting.values())}'
        assert sample in exposition([metrics.families()]).decode()


def test_two_engines_make_one_page_with_each_family_once() -> None:
    pages = [EngineMetrics(str(engine), INFO) for engine in range(2)]
    for page in pages:
        page.steps.inc(by=3)
    text = exposition([page.families() for page in pages]).decode()
    assert text.count("# TYPE slotserve_steps_total counter") == 1
    assert 'slotserve_steps_total{engine="0"} 3.0' in text
    assert 'slotserve_steps_total{engine="1"} 3.0' in text
    assert "_created" not in text


def test_what_is_reused_and_forgotten_is_counted_and_said_in_spans() -> None:
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=1)), Fcfs())
    with watched(engine) as subject:
        subject.run([request("first", 20, 2)])
        assert subject.metric('slotserve_warm_tokens{engine="0"}') == 21
        subject.run([request("again", 20, 2)])
        subject.run([replace(request("other", 20, 2), prompt=[7] * 20)])
        assert subject.metric('slotserve_reused_tokens_total{engine="0"}') == 19
        assert subject.metric('slotserve_copied_tokens_total{engine="0"}') == 0
        assert subject.metric('slotserve_evicted_tokens_total{engine="0"}') == 21
        assert subject.metric('slotserve_kv_tokens{engine="0"}') == 0
