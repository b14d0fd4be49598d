"""What a server's own trace (`GET /trace`) says about a run: its steps, its slots, who held them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.client import Server
from bench.report import BenchError
from engine_actor.chrome_trace import FIRST_SLOT_TRACK, STEPS_TRACK


@dataclass(frozen=True, slots=True)
class Step:
    """One step; seconds since the epoch."""

    started: float
    seconds: float
    requests: int
    """Unfinished requests that were computed in it."""
    waiting: int


@dataclass(frozen=True, slots=True)
class Stay:
    """A stretch of one slot in which a request was in one phase."""

    slot: int
    phase: str
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """One engine between two moments."""

    steps: list[Step]
    stays: list[Stay]
    slots: int

    def utilization(self) -> float | None:
        """Slots doing an unfinished request's work / slots, weighted by time, from first to last step."""
        return self._share(list(pairwise(self.steps)))

    def utilization_while_waiting(self) -> float | None:
        """The same over the steps after which someone still waited for a slot."""
        return self._share([(step, after) for step, after in pairwise(self.steps) if step.waiting])

    def _share(self, steps: Sequence[tuple[Step, Step]]) -> float | None:
        # Time runs from step to step, so the pauses between them count as idle.
        elapsed = sum(after.started - step.started for step, after in steps)
        busy = sum(step.seconds * step.requests for step, _ in steps)
        return busy / (elapsed * self.slots) if elapsed else None


def fetch(server: Server, started: float, ended: float, *, seconds: float, save: Path) -> Observed:
    """The trace of the server's last `seconds`, cut to [started, ended]; the whole of it goes to `save`.

    Raises BenchError when the server does not give one.
    """
    answer = httpx.get(
        f"{server.url}/trace",
        params={"seconds": seconds},
        headers=server.headers("default"),
        timeout=120,
    )
    if not answer.is_success:
        raise BenchError(f"{server.url}/trace answered {answer.status_code}: {answer.text[:200]}")
    save.write_bytes(answer.content)
    return cut(json.loads(answer.content), started, ended)


def cut(trace: dict[str, Any], started: float, ended: float) -> Observed:
    """What the trace of one engine holds between two moments: all that ends after `started` and begins
    before `ended`."""
    origin = trace["otherData"]["started"]
    steps: list[Step] = []
    stays: list[Stay] = []
    slots = 0
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            slots = max(slots, event["tid"] - FIRST_SLOT_TRACK + 1)
        if event["ph"] != "X":
            continue
        at, seconds, args = origin + event["ts"] / 1e6, event["dur"] / 1e6, event["args"]
        # What began just before the start belongs to it: a client learns of a step's end a little late.
        if not (started < at + seconds and at <= ended):
            continue
        if event["tid"] == STEPS_TRACK and "step" in args:
            steps.append(Step(at, seconds, len(set(args["requests"])), args["waiting"]))
        elif event["name"] in ("prefill", "decode") and event["tid"] >= FIRST_SLOT_TRACK:
            stays.append(Stay(event["tid"] - FIRST_SLOT_TRACK, event["name"], at, seconds))
    return Observed(steps, stays, slots)
