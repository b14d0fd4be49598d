"""Steps as a trace that opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

Per engine one process with a track per slot (a bar per request, its phases inside, and in those the
forwards that served it, so that a stall is a hole; preemptions marked), a track of steps with their
phases inside, and counters for queue, slots and KV. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_actor.records import Interval, Share, StepRecord

STEPS_TRACK = 0
FIRST_SLOT_TRACK = 1
# Names of chrome://tracing's fixed palette; Perfetto colours by slice name by itself.
_COLOURS = {"prefill": "thread_state_runnable", "decode": "good", "sample": "rail_load", "admit": "grey"}

Event = dict[str, Any]


def chrome_trace(
    steps: Mapping[int, Sequence[StepRecord]], *, marks: Mapping[tuple[int, int], str] | None = None
) -> dict[str, Any]:
    """The trace of some engines' steps, by engine number, each in order.

    `marks` flags single steps, by (engine, step number), with a word across all tracks.
    Times are microseconds since the earliest step, whose wall clock stands in `otherData`.
    """
    origin = min((records[0].started for records in steps.values() if records), default=0.0)
    events: list[Event] = []
    for engine, records in steps.items():
        events += _EngineTrace(engine, origin, marks or {}).events(records)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"started": origin, "steps": sum(map(len, steps.values()))},
    }


@dataclass(slots=True)
class _Bar:
    """A request in a slot, or one of its phases there, while it is still growing."""

    name: str
    start: int
    end: int
    args: dict[str, Any]


class _EngineTrace:
    """Times are whole nanoseconds since the origin: inner slices must end exactly inside outer ones."""

    def __init__(self, engine: int, origin: float, marks: Mapping[tuple[int, int], str]) -> None:
        self._engine = engine
        self._origin = origin
        self._marks = marks
        self._events: list[tuple[tuple[int, int, int], Event]] = []
        """With the order viewers want: by start, and outer slices before the inner ones they begin with."""
        self._holders: dict[str, tuple[int, _Bar, _Bar]] = {}
        """By request id: its slot, its bar, the bar of its phase."""

    def events(self, records: Iterable[StepRecord]) -> list[Event]:
        slots = end = 0
        for record in records:
            slots = max(slots, record.running + record.free_slots, *(s.slot + 1 for s in record.shares), 0)
            # The wall clock and the monotonic one disagree by a little; steps never overlap.
            start = max(end, round((record.started - self._origin) * 1e9))
            end = start + _ns(record.seconds)
            self._step(record, start, end)
            for request_id, reason in record.preempted.items():
                self._preempt(request_id, reason, start)
            forwards = [i for i in record.intervals if i.phase in ("prefill", "decode")]
            for share in record.shares:
                self._serve(share, record.number, start, forwards[share.forward], end)
            for request_id in record.finished:
                self._close(request_id, end)
        for request_id, (_, bar, _) in list(self._holders.items()):
            self._close(request_id, bar.end)
        self._events.sort(key=lambda ordered: ordered[0])
        return self._names(slots) + [event for _, event in self._events]

    def _names(self, slots: int) -> list[Event]:
        tracks = {STEPS_TRACK: "steps"} | {FIRST_SLOT_TRACK + s: f"slot {s:02d}" for s in range(slots)}
        process = {"ph": "M", "pid": self._engine, "name": "process_name"}
        named: list[Event] = [process | {"args": {"name": f"engine {self._engine}"}}]
        for track, name in tracks.items():
            event = {"ph": "M", "pid": self._engine, "tid": track}
            named.append(event | {"name": "thread_name", "args": {"name": name}})
            named.append(event | {"name": "thread_sort_index", "args": {"sort_index": track}})
        return named

    def _slice(self, track: int, depth: int, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        event: Event = {"ph": "X", "pid": self._engine, "tid": track, "name": name}
        event |= {"ts": start / 1000, "dur": (end - start) / 1000, "args": args}
        if name in _COLOURS:
            event["cname"] = _COLOURS[name]
        self._events.append(((start, start - end, depth), event))

    def _instant(self, track: int, name: str, at: int, scope: str, args: dict[str, Any]) -> None:
        event: Event = {"ph": "i", "s": scope, "pid": self._engine, "tid": track}
        self._events.append(((at, 0, 0), event | {"name": name, "ts": at / 1000, "args": args}))

    def _step(self, record: StepRecord, start: int, end: int) -> None:
        prefill = sum(share.tokens for share in record.shares if share.kind == "prefill")
        args = {
            "step": record.number,
            "requests": [share.request_id for share in record.shares],
            "prefill rows": prefill,
            "decode rows": sum(share.tokens for share in record.shares) - prefill,
            "padding rows": record.padded_rows - record.rows,
            "waiting": record.waiting,
            "running": record.running,
            "admitted": record.admitted,
            "preempted": list(record.preempted),
            "finished": record.finished,
        }
        self._slice(STEPS_TRACK, 0, f"step {record.number}", start, end, args)
        for interval in record.intervals:
            begin, stop = start + _ns(interval.offset), start + _ns(interval.offset + interval.seconds)
            self._slice(STEPS_TRACK, 1, interval.phase, begin, stop, {})
        counters = {
            "queue": {"waiting": record.waiting},
            "slots": {"running": record.running, "free": record.free_slots},
            "KV tokens": {"cached": record.kv_tokens},
        }
        for name, values in counters.items():
            event: Event = {"ph": "C", "pid": self._engine, "name": name, "ts": start / 1000}
            self._events.append(((start, 0, 0), event | {"args": values}))
        if mark := self._marks.get((self._engine, record.number)):
            self._instant(STEPS_TRACK, mark, start, "g", {"step": record.number})

    def _serve(self, share: Share, step: int, start: int, forward: Interval, step_end: int) -> None:
        begin, stop = start + _ns(forward.offset), start + _ns(forward.offset + forward.seconds)
        # A token is out when its step ends, not when its forward does.
        end = step_end if share.sampled else stop
        if share.request_id not in self._holders:
            bar = _Bar(share.request_id, begin, end, {"tenant": share.tenant, "request": share.request_id})
            self._holders[share.request_id] = (share.slot, bar, _Bar(share.kind, begin, end, {"tokens": 0}))
        slot, bar, phase = self._holders[share.request_id]
        if phase.name != share.kind:
            self._slice(FIRST_SLOT_TRACK + slot, 1, phase.name, phase.start, phase.end, phase.args)
            phase = _Bar(share.kind, phase.end, end, {"tokens": 0})
            self._holders[share.request_id] = (slot, bar, phase)
        phase.args["tokens"] += share.tokens
        bar.end = phase.end = end
        name = f"chunk {share.start}..{share.start + share.tokens}" if share.kind == "prefill" else "token"
        args = {"step": step, "from": share.start, "tokens": share.tokens}
        self._slice(FIRST_SLOT_TRACK + slot, 2, name, begin, stop, args if share.kind == "prefill" else {})

    def _preempt(self, request_id: str, reason: str, at: int) -> None:
        if request_id in self._holders:
            slot, bar, _ = self._holders[request_id]
            self._close(request_id, bar.end)
            args = {"request": request_id, "reason": reason}
            self._instant(FIRST_SLOT_TRACK + slot, "preempted", at, "t", args)

    def _close(self, request_id: str, end: int) -> None:
        if (held := self._holders.pop(request_id, None)) is not None:
            slot, bar, phase = held
            self._slice(FIRST_SLOT_TRACK + slot, 1, phase.name, phase.start, end, phase.args)
            self._slice(FIRST_SLOT_TRACK + slot, 0, bar.name, bar.start, end, bar.args)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
