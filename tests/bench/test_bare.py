"""The bare run on a toy model: timelines from arrival, and slots counted only while they work."""

from __future__ import annotations

import itertools

import pytest

from bench import bare
from bench.workload import Item, Workload
from engine_actor.engine import Engine
from engine_actor.records import Interval, Share, StepRecord
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage


def item(name: str, prompt: int, output: int, arrival: float = 0.0) -> Item:
    return Item(name, arrival, tuple(range(1, prompt + 1)), output)


def record(number: int, seconds: float, slots: list[int], waiting: int = 0) -> StepRecord:
    shares = [Share(f"r{slot}", "default", slot, "decode", 0, 1, True) for slot in slots]
    return StepRecord(
        number, 0.0, intervals=[Interval("decode", 0.0, seconds)], shares=shares, waiting=waiting
    )


def test_every_request_gets_its_forced_length_and_a_time_per_token() -> None:
    load = Workload("toy", tuple(item(f"r{i}", 1 + i, 2 + 3 * i) for i in range(5)))
    run = bare.drive(Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=2)), Fcfs()), load)
    assert [len(t.output) for t in run.requests] == [2, 5, 8, 11, 14]
    for timeline in run.requests:
        assert len(timeline.token_times) == len(timeline.output)
        assert timeline.token_times == sorted(timeline.token_times)
        assert timeline.ttft >= 0
    figures = run.summary()
    assert figures["completed"] == figures["requests"] == 5
    assert figures["tokens_per_s"] == pytest.approx(40 / run.seconds)


def test_ttft_counts_from_arrival_queue_included() -> None:
    load = Workload("toy", (item("first", 1, 30), item("second", 1, 1)))
    engine = Engine(ModelExecutor(FakeModel(), fake_storage(num_slots=1)), Fcfs())
    ticks = itertools.count()
    engine.clock = lambda: float(next(ticks))
    first, second = bare.drive(engine, load).requests
    assert second.arrival == first.arrival
    assert second.ttft > first.e2e


def test_a_later_arrival_is_not_submitted_early() -> None:
    load = Workload("toy", (item("now", 1, 1), item("later", 1, 1, arrival=0.05)))
    run = bare.drive(Engine(ModelExecutor(FakeModel(), fake_storage()), Fcfs()), load)
    assert run.requests[1].admitted is not None
    assert run.requests[1].admitted >= run.started + 0.05


def test_utilization_weighs_working_slots_by_time() -> None:
    records = [record(0, 3.0, [0, 1, 2, 3], waiting=1), record(1, 1.0, [2])]
    assert bare.utilization(records, slots=4) == pytest.approx((3 * 4 + 1) / 16)
    assert bare.utilization(records, slots=4, seconds=8.0) == pytest.approx(13 / 32)
    assert bare.utilization([], slots=4) is None


def test_a_slot_counts_once_however_many_rows_it_brings() -> None:
    twice = record(0, 1.0, [0, 0])
    assert bare.utilization([twice], slots=2) == pytest.approx(0.5)


def test_a_decode_held_up_by_a_prefill_is_not_at_work() -> None:
    shares = [
        Share("new", "default", 0, "prefill", 0, 9, True, forward=0),
        Share("a", "default", 1, "decode", 5, 1, True, forward=1),
        Share("b", "default", 2, "decode", 5, 1, True, forward=1),
    ]
    phases = {"admit": 0.0, "prefill": 6.0, "sample": 1.0, "decode": 2.0, "retire": 1.0}
    step = StepRecord(0, 0.0, intervals=[Interval(p, 0.0, s) for p, s in phases.items()], shares=shares)
    step.intervals.insert(4, Interval("sample", 0.0, 0.0))
    assert bare.utilization([step], slots=3, seconds=10.0) == pytest.approx((7 * 1 + 2 * 2 + 1 * 3) / 30)
