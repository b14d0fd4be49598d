"""The trace, parsed as a viewer would: tracks, nesting, every request and step in its place."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.chrome_trace import FIRST_SLOT_TRACK, STEPS_TRACK, chrome_trace
from engine_actor.clock import wall
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.request import Request
from engine_actor.scheduler import Mode
from engine_actor.step_wire import decode_step, encode_step
from model.executor import SamplingParams
from model.model_executor import ModelExecutor
from policies.fcfs import Fcfs
from tests.fakes import FakeModel, fake_storage

NANOSECOND = 1e-3
"""In the trace's microseconds: finer than a viewer can tell."""


def busy_steps(mode: Mode = "chunked", kv_budget: int | None = 48) -> list[StepRecord]:
    """Seven requests through four slots, tight enough in KV that some are preempted."""
    engine = Engine(
        ModelExecutor(FakeModel(), fake_storage()), Fcfs(), mode=mode, max_step_tokens=6, kv_budget=kv_budget
    )
    for index in range(7):
        prompt = list(range(index, index + 3 + index))
        params = SamplingParams(max_tokens=8 + 4 * index, temperature=0)
        engine.submit(Request(f"request-{index}", prompt, params, tenant=f"t{index % 2}", arrival=index))
    records = []
    while engine.has_work():
        records.append(engine.step()[1])
    return records


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one track either nest or follow each other: what viewers need to stack them."""
    open_ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        ends = open_ends[event["pid"], event["tid"]]
        while ends and ends[-1] <= event["ts"] + NANOSECOND:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + NANOSECOND, f"{event['name']} sticks out of the slice around it"
        ends.append(end)


def slices(trace: dict[str, Any], track: int) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == track]


@pytest.mark.parametrize("mode", ["separate", "batched", "chunked"])
def test_every_request_and_every_step_is_where_it_ran(mode: Mode) -> None:
    records = busy_steps(mode)
    trace = json.loads(json.dumps(chrome_trace({0: records})))
    events = trace["traceEvents"]
    check_nesting(events)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    assert timed[0] == 0

    steps = slices(trace, STEPS_TRACK)
    assert [e["name"] for e in steps if e["name"].startswith("step ")] == [
        f"step {record.number}" for record in records
    ]
    assert sum(e["name"] == "decode" for e in steps) == sum(
        interval.phase == "decode" for record in records for interval in record.intervals
    )
    served = {(span.request_id, span.slot) for record in records for span in record.shares}
    bars = {
        (e["name"], e["tid"] - FIRST_SLOT_TRACK)
        for slot in range(4)
        for e in slices(trace, FIRST_SLOT_TRACK + slot)
        if e["name"].startswith("request-")
    }
    assert bars == served
    chunk_tokens = sum(
        e["args"]["tokens"]
        for slot in range(4)
        for e in slices(trace, FIRST_SLOT_TRACK + slot)
        if e["name"].startswith("chunk ")
    )
    assert chunk_tokens == sum(
        span.tokens for record in records for span in record.shares if span.kind == "prefill"
    )
    tokens = [e for slot in range(4) for e in slices(trace, FIRST_SLOT_TRACK + slot) if e["name"] == "token"]
    assert len(tokens) == sum(span.kind == "decode" for record in records for span in record.shares)
    preempted = [e for e in events if e["ph"] == "i" and e["name"] == "preempted"]
    assert len(preempted) == sum(len(record.preempted) for record in records) > 0
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {"engine 0", "steps", "slot 00", "slot 01", "slot 02", "slot 03"}
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) == 3 * len(records)
    assert [e["args"]["waiting"] for e in counters if e["name"] == "queue"] == [r.waiting for r in records]


def test_a_window_that_opens_in_the_middle_shows_who_was_already_there() -> None:
    records = busy_steps(kv_budget=None)
    middle = [record for record in records if record.running == 4][2:]
    trace = chrome_trace({0: middle})
    check_nesting(trace["traceEvents"])
    first = {span.request_id for span in middle[0].shares}
    assert first <= {e["name"] for e in trace["traceEvents"]}


def test_engines_are_processes_on_one_clock_and_a_mark_names_a_step() -> None:
    early, late = busy_steps(), busy_steps()
    trace = chrome_trace({0: early, 1: late}, marks={(1, late[3].number): "guilty"})
    starts = {
        pid: min(e["ts"] for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == "X")
        for pid in (0, 1)
    }
    assert starts[1] - starts[0] == pytest.approx((late[0].started - early[0].started) * 1e6, abs=1)
    [mark] = [e for e in trace["traceEvents"] if e["name"] == "guilty"]
    assert (mark["ph"], mark["s"], mark["args"]["step"]) == ("i", "g", late[3].number)


def test_no_steps_make_an_empty_trace() -> None:
    assert chrome_trace({0: []})["otherData"]["steps"] == 0


def test_a_record_survives_the_wire() -> None:
    for record in busy_steps("separate"):
        shown = replace(record, started=wall(record.started))
        assert decode_step(encode_step(record, {"queue": {"t0": 3}})) == shown
