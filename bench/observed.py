"""What a server's own trace (`GET /trace`) tells of a run: its steps, its slots, who held them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.chart import FAINT, INK, Axes
from bench.client import Endpoint
from bench.report import BenchError
from engine_actor.chrome_trace import FIRST_SLOT_TRACK, STEPS_TRACK

Trace = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One step as a trace or a span tells it; seconds since the epoch."""

    engine: str
    number: int
    started: float
    seconds: float
    prefill_rows: int
    decode_rows: int
    waiting: int
    requests: list[str]
    """Computed in it, named once for each of their pieces."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one forward did for one slot."""

    slot: int
    phase: str
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """One engine between two moments."""

    steps: list[Step]
    served: list[Served]
    slots: int

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps[-1].started + self.steps[-1].seconds - self.steps[0].started

    def utilization(self) -> float | None:
        """Slots doing an unfinished request's work / slots, weighted by time, from first to last step."""
        return self._share(list(pairwise(self.steps)))

    def utilization_while_waiting(self) -> float | None:
        """The same over the steps after which someone still waited for a slot."""
        return self._share([(step, after) for step, after in pairwise(self.steps) if step.waiting])

    def _share(self, steps: Sequence[tuple[Step, Step]]) -> float | None:
        # Time runs from step to step, so the pauses between them count as idle.
        elapsed = sum(after.started - step.started for step, after in steps)
        busy = sum(step.seconds * len(set(step.requests)) for step, _ in steps)
        return busy / (elapsed * self.slots) if elapsed else None

    def draw(self, axes: Axes, colour: str, prefill: str = INK) -> None:
        """Slots over seconds: decode in `colour`, what is not at work in grey."""
        start = self.steps[0].started
        axes.axvspan(0, self.seconds, color=FAINT, linewidth=0)
        for slot in range(self.slots):
            own = [served for served in self.served if served.slot == slot]
            bars = [(served.started - start, served.seconds) for served in own]
            shades = [prefill if served.phase == "prefill" else colour for served in own]
            axes.broken_barh(bars, (slot + 0.1, 0.8), color=shades)
        axes.set(ylabel="slot", ylim=(self.slots, 0), yticks=[0.5, self.slots - 0.5])
        axes.set_yticklabels(["0", str(self.slots - 1)])
        axes.grid(visible=False)


def fetch(endpoint: Endpoint, seconds: float, save: Path) -> dict[str, Any]:
    """The trace of the server's last `seconds`, which goes to the file `save`, too.

    Raises BenchError when the server does not give one.
    """
    try:
        answer = httpx.get(
            f"{endpoint.url}/trace", params={"seconds": seconds}, headers=endpoint.headers(), timeout=120
        )
    except httpx.HTTPError as error:
        raise BenchError(f"cannot reach {endpoint.url}: {error}") from error
    if not answer.is_success:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = answer.text[:200]
        raise BenchError(f"{endpoint.url}/trace answered {answer.status_code}: {message}")
    save.write_bytes(answer.content)
    trace: dict[str, Any] = json.loads(answer.content)
    return trace


def steps(trace: Trace) -> list[Step]:
    return [
        Step(
            f"engine-{event['pid']}",
            event["args"]["step"],
            started,
            seconds,
            event["args"]["prefill rows"],
            event["args"]["decode rows"],
            event["args"]["waiting"],
            event["args"]["requests"],
        )
        for event, started, seconds in _slices(trace)
        if event["tid"] == STEPS_TRACK and "step" in event["args"]
    ]


def cut(trace: Trace, started: float, ended: float) -> Observed:
    """What the trace of one engine holds between two moments: all that ends after `started` and begins
    before `ended`."""

    def within(at: float, seconds: float) -> bool:
        # What began just before the start belongs to it: a client learns of a step's end a little late.
        return started < at + seconds and at <= ended

    tracks = [e["tid"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    forwards = {"chunk": "prefill", "token": "decode"}
    return Observed(
        [step for step in steps(trace) if within(step.started, step.seconds)],
        [
            Served(event["tid"] - FIRST_SLOT_TRACK, forwards[event["name"].partition(" ")[0]], at, seconds)
            for event, at, seconds in _slices(trace)
            if event["name"] == "token" or event["name"].startswith("chunk ")
            if within(at, seconds)
        ],
        slots=max(tracks, default=0),
    )


def _slices(trace: Trace) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Events that last, when they start and for how long."""
    origin = trace["otherData"]["started"]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            yield event, origin + event["ts"] / 1e6, event["dur"] / 1e6
