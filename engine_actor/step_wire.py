"""A step record as one line of JSON: what the ring keeps, the page draws and the trace is built from.

Bytes, not objects: ten minutes of steps are some hundred thousand spans, and as objects they would
make every full garbage collection stall the step thread.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from engine_actor.clock import wall
from engine_actor.records import Interval, Share, StepRecord

_interval = attrgetter(*(f.name for f in fields(Interval)))
_share = attrgetter(*(f.name for f in fields(Share)))
_PLAIN = tuple(f.name for f in fields(StepRecord) if f.name not in ("intervals", "shares"))


def encode_step(record: StepRecord, extra: Mapping[str, Any] | None = None) -> bytes:
    """One JSON object under the record's field names, `started` as wall time.

    Shares and intervals are lists of their field values.
    `extra` adds what the record does not know, such as who waits.
    """
    line: dict[str, Any] = {name: getattr(record, name) for name in _PLAIN}
    line["started"] = wall(record.started)
    line["intervals"] = [_interval(interval) for interval in record.intervals]
    line["shares"] = [_share(share) for share in record.shares]
    if extra:
        line.update(extra)
    return json.dumps(line, separators=(",", ":")).encode()


def decode_step(line: bytes | Mapping[str, Any]) -> StepRecord:
    """The record again; what `extra` added is left out."""
    data: Mapping[str, Any] = json.loads(line) if isinstance(line, bytes) else line
    return StepRecord(
        **{name: data[name] for name in _PLAIN},
        intervals=[Interval(*values) for values in data["intervals"]],
        shares=[Share(*values) for values in data["shares"]],
    )


def pack_steps(steps: Sequence[bytes]) -> bytes:
    """Encoded steps as one message: minutes of them one by one would keep the interpreter for seconds.

    Both joining and compressing let other threads run meanwhile.
    """
    return zlib.compress(b"\n".join(steps), level=1)


def unpack_steps(packed: bytes) -> list[bytes]:
    """What `pack_steps` was given."""
    return zlib.decompress(packed).splitlines()


def page_message(
    engine: str,
    steps: Sequence[bytes],
    now: float | None = None,
    queue: Mapping[str, int] | None = None,
) -> bytes:
    """Encoded steps as one line for live pages, without decoding them; `queue`: who waits, by tenant."""
    head = json.dumps({"engine": engine, "now": now, "queue": queue or {}}).encode()
    return head[:-1] + b',"steps":[' + b",".join(steps) + b"]}\n"
