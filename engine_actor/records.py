"""What an observer sees: a step that is over, and how full the engine is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine_actor.request import PreemptReason


@dataclass(slots=True)
class Share:
    """What one request did in one forward: `tokens` rows in `slot`, from position `start`."""

    request_id: str
    tenant: str
    slot: int
    kind: Literal["prefill", "decode"]
    start: int
    tokens: int
    sampled: bool = False
    """Whether a token came of it."""
    forward: int = 0
    """Which of the step's forwards: the position among its prefill and decode intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of a step: admit, prefill, decode, sample or retire."""

    phase: str
    offset: float
    """Seconds since the step started."""
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """One step. Times are seconds; `started` is of the engine's clock."""

    number: int
    started: float
    intervals: list[Interval] = field(default_factory=list)
    """What the step did when, in order; mode `separate` has a prefill and a sample per prompt."""
    shares: list[Share] = field(default_factory=list)
    forwards: int = 0
    rows: int = 0
    """Rows that did a request's work, over all forwards."""
    padded_rows: int = 0
    """Rows computed, padding included."""
    admitted: list[str] = field(default_factory=list)
    reused: dict[str, int] = field(default_factory=dict)
    """Tokens that requests admitted in this step found computed, by id."""
    copied: int = 0
    """How many of them were copied from another slot."""
    evicted: int = 0
    """Tokens of warm slots forgotten in this step."""
    preempted: dict[str, PreemptReason] = field(default_factory=dict)
    """Why each lost its slot, by id."""
    finished: list[str] = field(default_factory=list)
    waiting: int = 0
    running: int = 0
    free_slots: int = 0
    warm: list[int] = field(default_factory=list)
    """Slots that are free and remember something."""
    kv_tokens: int = 0
    kv_budget: int = 0
    errors: int = 0
    """Forwards that failed in this step, or whose every request did."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase, summed over its intervals."""
        totals: dict[str, float] = {}
        for interval in self.intervals:
            totals[interval.phase] = totals.get(interval.phase, 0.0) + interval.seconds
        return totals

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last interval."""
        return self.intervals[-1].offset + self.intervals[-1].seconds if self.intervals else 0.0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an engine is at one moment."""

    running: int
    slots: int
    free_slots: int
    kv_tokens: int
    warm_tokens: int
    step_time: tuple[float, float, float]
    """Seconds of a step, of a row and of a cached token, as learned so far."""
    kv_budget: int
