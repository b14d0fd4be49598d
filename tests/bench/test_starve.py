"""What a workload needs of the KV pool, read off its steps."""

from __future__ import annotations

from bench.starve import peak_kv
from engine_actor.records import Share, StepRecord


def share(name: str, start: int, tokens: int) -> Share:
    return Share(name, "default", 0, "prefill", start, tokens, sampled=False)


def test_a_request_without_rows_in_a_step_still_holds_its_kv() -> None:
    records = [
        StepRecord(0, 0.0, shares=[share("a", 0, 10), share("b", 0, 6)]),
        StepRecord(1, 1.0, shares=[share("a", 10, 1)], finished=["a"]),
        StepRecord(2, 2.0, shares=[share("b", 6, 5)], finished=["b"]),
    ]
    assert peak_kv(records) == 17
