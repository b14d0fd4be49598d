"""A workload on a bare engine: no Ray, no HTTP, only the step loop and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.report import Advance, BenchError
from bench.timeline import Timelines
from bench.workload import Workload, preset
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.request import Request
from engine_actor.scheduler import Mode, Reuse
from model.model_executor import ModelExecutor
from model.transformer import Transformer
from policies import load_policy
from policies.base import Policy

if TYPE_CHECKING:
    from engine_actor.telemetry import Telemetry


@dataclass(slots=True)
class Run(Timelines):
    """A workload and every step that it took."""

    records: list[StepRecord]
    slots: int

    @property
    def while_waiting(self) -> list[StepRecord]:
        """Steps after which someone still waited: all but those in which the run fills up or runs dry."""
        return [record for record in self.records if record.waiting]

    @property
    def tokens_per_s_while_waiting(self) -> float:
        tokens = sum(share.sampled for record in self.while_waiting for share in record.shares)
        return tokens / (sum(record.seconds for record in self.while_waiting) or 1)

    def summary(self) -> dict[str, Any]:
        """Timelines.summary, with what only the steps know."""
        return {
            **Timelines.summary(self),
            "steps": len(self.records),
            "utilization": utilization(self.records, self.slots, self.seconds),
            "utilization_while_waiting": utilization(self.while_waiting, self.slots),
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


def load(path: str | None = None) -> Transformer:
    """The packaged model, or the one at `path`, on this machine's device: warm, so that nothing compiles
    while a clock is watched. Raises BenchError when there is none."""
    from model.config import ModelError
    from model.loader import load_model

    try:
        model = load_model(path)
    except (FileNotFoundError, ModelError) as error:
        raise BenchError(str(error)) from error
    drive(build(model, slots=4, max_len=128), preset("smoke", vocab=model.vocab_size))
    return model


def build(
    model: Transformer,
    *,
    slots: int = 16,
    max_len: int = 2048,
    policy: str | Policy = "fcfs",
    mode: Mode = "chunked",
    max_step_tokens: int | None = None,
    kv_budget: int | None = None,
    prefix_reuse: Reuse = "off",
) -> Engine:
    """A fresh engine with its own KV around a loaded model; a policy by name or as it is.

    Experiments repeat their workloads, so prefixes are not reused unless they are the question.
    """
    policy = load_policy(policy) if isinstance(policy, str) else policy
    executor = ModelExecutor(model, model.new_storage(num_slots=slots, max_len=max_len))
    return Engine(
        executor,
        policy,
        mode=mode,
        max_step_tokens=max_step_tokens,
        kv_budget=kv_budget,
        prefix_reuse=prefix_reuse,
    )


def drive(
    engine: Engine,
    workload: Workload,
    *,
    advance: Advance | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    telemetry: Telemetry | None = None,
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
            requests[item.id] = request = item.request(started)
            if telemetry is not None:
                telemetry.on_submit(request)
            engine.submit(request)
        if not engine.has_work():
            time.sleep(max(0.0, started + due[-1].arrival - clock()))
            continue
        outputs, record = engine.step()
        now = clock()
        records.append(record)
        if telemetry is not None:
            telemetry.on_step(record)
        for output in outputs:
            timeline = by_id[output.request_id]
            timeline.error = output.error
            if output.sampled is not None:
                timeline.token_times.append(now)
                timeline.output.append(output.sampled.token)
            if telemetry is not None and output.finish_reason is not None:
                telemetry.on_end(requests[output.request_id])
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
