"""The ring of encoded steps, from a real step loop on the toy model."""

from __future__ import annotations

import json

from engine_actor.records import StepRecord
from engine_actor.step_wire import decode_step, pack_steps, unpack_steps
from tests.engine_actor.watched import request, tight_engine, watched


def test_the_ring_keeps_the_last_steps_within_so_many_bytes_and_tells_who_waits() -> None:
    with watched(tight_engine(), history_bytes=5000) as subject:
        requests = [request(f"r{i}", 9, 8, f"tenant-{i % 2}") for i in range(4)]
        subject.run(requests)
        telemetry = subject.telemetry
        lines = telemetry.steps_of_last(60)
        last, _ = telemetry.history.steps_since(-1, 1)
        numbers = [decode_step(line).number for line in lines]
        assert numbers == list(range(last - len(lines) + 1, last + 1))
        assert numbers[0] > 0
        assert 5000 - 2 * max(map(len, lines)) < sum(map(len, lines)) <= 5000
        assert unpack_steps(pack_steps(lines)) == lines
        assert unpack_steps(pack_steps([])) == []
        newest, news = telemetry.history.steps_since(last - 2, 10)
        assert (newest, [json.loads(line)["number"] for line in news]) == (last, [last - 1, last])
        assert len(telemetry.history.steps_since(-1, 3)[1]) == 3
        assert telemetry.history.steps_since(last, 3) == (last, [])
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
        assert subject.telemetry.history.waiting() == {}
