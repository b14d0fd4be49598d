"""A workload on a bare engine: no Ray, no HTTP, only the step loop and its clock."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import Advance, BenchError
from bench.timeline import Timelines, latencies
from bench.workload import Workload, preset
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.request import Request
from engine_actor.scheduler import Mode
from model.model_executor import ModelExecutor
from model.transformer import Transformer
from policies.base import Policy
from policies.fcfs import Fcfs


@dataclass(slots=True)
class Run(Timelines):
    """A workload and every step that it took."""

    records: list[StepRecord]
    slots: int

    def summary(self) -> dict[str, Any]:
        """Timelines.summary, with what only the steps know."""
        waiting = [record for record in self.records if record.waiting]
        return {
            **latencies(self.requests, self.seconds),
            "steps": len(self.records),
            "utilization": utilization(self.records, self.slots, self.seconds),
            "utilization_while_waiting": utilization(waiting, self.slots),
            "preemptions": sum(t.preemptions for t in self.requests),
        }


def utilization(records: Sequence[StepRecord], slots: int, seconds: float | None = None) -> float | None:
    """Slots doing an unfinished request's work (prefill or decode) / slots, weighted by time.

    A forward and its sampling count for the slots in it, what surrounds them for all slots of the
    step. Not at work: a finished request that keeps its slot, a decode that a prefill holds up, a
    prompt that waits its turn for the token budget. Over `seconds` of wall time, idle time included;
    over the steps' own time when None.
    """
    total = sum(record.seconds for record in records) if seconds is None else seconds
    return sum(map(_slot_seconds, records)) / (total * slots) if total else None


def _slot_seconds(record: StepRecord) -> float:
    served: dict[int, set[int]] = {}
    for share in record.shares:
        served.setdefault(share.forward, set()).add(share.slot)
    everyone = len(set().union(*served.values()))
    forward, busy = -1, 0.0
    for interval in record.intervals:
        forward += interval.phase in ("prefill", "decode")
        in_forward = interval.phase not in ("admit", "retire")
        busy += interval.seconds * (len(served.get(forward, ())) if in_forward else everyone)
    return busy


def load(model: str | None = None) -> Transformer:
    """The packaged model, or the one at the path `model`, on this machine's device.

    Raises BenchError when there is none.
    """
    from model.loader import ModelError, load_model

    try:
        return load_model(model)
    except (FileNotFoundError, ModelError) as error:
        raise BenchError(str(error)) from error


def build(
    model: Transformer,
    *,
    slots: int = 16,
    max_len: int = 2048,
    policy: Policy | None = None,
    mode: Mode = "chunked",
    max_step_tokens: int | None = None,
    kv_budget: int | None = None,
) -> Engine:
    """A fresh engine with its own KV around a loaded model; fcfs unless told otherwise."""
    policy = policy or Fcfs()
    executor = ModelExecutor(model, model.new_storage(num_slots=slots, max_len=max_len))
    return Engine(executor, policy, mode=mode, max_step_tokens=max_step_tokens, kv_budget=kv_budget)


def drive(
    engine: Engine,
    workload: Workload,
    *,
    advance: Advance | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Run:
    """Submit each item when it is due and step until all are done; `advance` counts output tokens."""
    clock = engine.clock
    started = clock()
    due = list(reversed(workload.items))
    requests: dict[str, Request] = {}
    timelines = Timelines.of(workload, started).requests
    by_id = {timeline.item.id: timeline for timeline in timelines}
    records: list[StepRecord] = []
    while due or engine.has_work():
        while due and started + due[-1].arrival <= clock():
            item = due.pop()
            requests[item.id] = item.request(started)
            engine.submit(requests[item.id])
        if not engine.has_work():
            time.sleep(max(0.0, started + due[-1].arrival - clock()))
            continue
        outputs, record = engine.step()
        now = clock()
        records.append(record)
        for output in outputs:
            timeline = by_id[output.request_id]
            timeline.error = output.error
            if output.sampled is not None:
                timeline.token_times.append(now)
                timeline.output.append(output.sampled.token)
        if advance:
            advance(len(outputs))
        if on_step:
            on_step(record)
    for name, request in requests.items():
        timeline = by_id[name]
        timeline.admitted = request.admitted
        timeline.preemptions = request.num_preemptions
        timeline.recomputed_tokens = request.recomputed_tokens
    return Run(timelines, started, clock(), records, engine.slots.count)


def warm_up(model: Transformer) -> None:
    """Run one short workload, so that nothing compiles while a clock is watched."""
    drive(build(model, slots=4, max_len=128), preset("smoke", vocab=model.vocab_size))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the engine under test."""
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory (default: packaged)")
    parser.add_argument("--slots", type=int, default=16, help="requests that run at once (default: 16)")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens a slot holds (default: 2048)")
