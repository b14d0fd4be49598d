"""A server's trace gives the same slot figures as the step records it was drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import bare, observed
from bench.client import Endpoint
from bench.observed import Observed, Step
from bench.report import BenchError
from bench.workload import Item, Workload
from engine_actor.chrome_trace import chrome_trace
from engine_actor.engine import Engine
from model.model_executor import ModelExecutor
from policies import load_policy
from tests.bench.fake_server import FakeServer
from tests.fakes import FakeModel, fake_storage


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_a_trace_keeps_steps_stays_and_utilization(policy: str) -> None:
    items = [Item(f"r{i}", 0.0, (1, 2, 3), 2 + 5 * (i % 3)) for i in range(9)]
    run = bare.drive(
        Engine(ModelExecutor(FakeModel(), fake_storage()), load_policy(policy)), Workload("toy", tuple(items))
    )
    seen = observed.cut(chrome_trace({0: run.records}), run.started, run.ended)
    assert (seen.slots, len(seen.steps)) == (4, len(run.records))
    assert [served.phase for served in seen.served].count("prefill") == 9
    assert len(seen.served) == sum(len(record.shares) for record in run.records)
    assert {served.slot for served in seen.served} == set(range(4))
    assert seen.seconds == pytest.approx(run.seconds, abs=0.05)
    busy = sum(step.seconds * len(step.requests) for step in seen.steps)
    worked = sum(record.seconds * len({span.slot for span in record.shares}) for record in run.records)
    assert busy == pytest.approx(worked, rel=0.001)
    nothing = observed.cut(chrome_trace({0: run.records}), run.ended + 1, run.ended + 2)
    assert nothing.steps == []
    assert nothing.utilization() is None


def test_a_step_that_begins_before_the_start_and_ends_after_it_counts() -> None:
    items = tuple(Item(f"r{i}", 0.0, (1, 2, 3), 6) for i in range(2))
    records = bare.drive(
        Engine(ModelExecutor(FakeModel(), fake_storage()), load_policy("fcfs")), Workload("toy", items)
    ).records
    third, last = records[2], records[-1]
    trace, end = chrome_trace({0: records}), last.started + last.seconds / 2
    assert len(observed.cut(trace, third.started + third.seconds / 2, end).steps) == len(records) - 2
    assert len(observed.cut(trace, third.started, third.started + third.seconds / 2).steps) == 1


def test_pauses_between_steps_count_as_idle_and_waiting_is_told_apart() -> None:
    steps = [
        Step("engine-0", number, started, 1.0, 0, len(names), waiting, [*names])
        for number, (started, names, waiting) in enumerate([(0.0, "ab", 3), (2.0, "aa", 0), (3.0, "a", 0)])
    ]
    seen = Observed(steps, [], slots=2)
    assert seen.utilization() == pytest.approx((2 * 1 + 1 * 1) / (2 * 3))
    assert seen.utilization_while_waiting() == pytest.approx(2 / (2 * 2))


def test_a_server_without_a_trace_is_one_line(tmp_path: Path) -> None:
    with FakeServer().running() as fake, pytest.raises(BenchError, match="/trace answered 404"):
        observed.fetch(Endpoint(fake.url), 1, tmp_path / "t.json")
