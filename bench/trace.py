"""Which step was slow, and who was in it: a trace for ui.perfetto.dev and a list of the slowest steps.

Without options it runs a workload on a bare engine. `--url` asks a running server for what it did
lately; `--spans` reads the span files that a server without a collector writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx

from bench import bare, workload
from bench.report import BenchError, Report
from engine_actor.chrome_trace import STEPS_TRACK, chrome_trace
from engine_actor.scheduler import Mode

SHOWN = 8
"""Steps listed, and requests named in each."""


@dataclass(frozen=True)
class Step:
    """A step as a trace or a span tells it."""

    engine: str
    number: int
    seconds: float
    prefill_rows: int
    decode_rows: int
    waiting: int
    requests: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bare.add_arguments(parser)
    workload.add_arguments(parser, default="smoke")
    parser.add_argument("--mode", choices=get_args(Mode), default="chunked", help="default: chunked")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    source.add_argument("--spans", type=Path, metavar="DIR", help="a directory of span files: run/traces")
    parser.add_argument("--seconds", type=float, default=60, help="how far back, with --url (default: 60)")
    parser.add_argument("--api-key", help="for a server with keys")


def run(args: argparse.Namespace) -> int:
    report = Report("trace", args.out)
    if args.spans is not None:
        steps = list(steps_of_spans(args.spans))
    else:
        trace = _fetch(args.url, args.seconds, args.api_key) if args.url else _record(args, report)
        path = args.out / "perfetto.json"
        path.write_text(json.dumps(trace))
        report.say(f"wrote {path}: open it in https://ui.perfetto.dev (it is not uploaded)")
        steps = steps_of_trace(trace)
    if not steps:
        raise BenchError("there are no steps in it: nothing has run")
    slowest = sorted(steps, key=lambda step: -step.seconds)[:SHOWN]
    report.table(
        f"The slowest of {len(steps):,} steps",
        ["engine", "step", "ms", "prefill rows", "decode rows", "waiting", "requests"],
        [
            [
                s.engine,
                s.number,
                s.seconds * 1e3,
                s.prefill_rows,
                s.decode_rows,
                s.waiting,
                _names(s.requests),
            ]
            for s in slowest
        ],
    )
    report.note(
        "Many prefill rows in a slow step: a long prompt held everyone up; a smaller max_step_tokens or "
        "mode chunked spreads it out."
    )
    return report.finish({"steps": len(steps), "slowest": [vars(step) for step in slowest]})


def steps_of_trace(trace: Mapping[str, Any]) -> list[Step]:
    """The steps in a Chrome trace of ours."""
    return [
        Step(
            f"engine-{event['pid']}",
            event["args"]["step"],
            event["dur"] / 1e6,
            event["args"]["prefill rows"],
            event["args"]["decode rows"],
            event["args"]["waiting"],
            event["args"]["requests"],
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] == STEPS_TRACK and event["name"].startswith("step ")
    ]


def steps_of_spans(directory: Path) -> Iterable[Step]:
    """The `engine.step` spans in files of OTLP JSON lines. Raises BenchError naming file and line."""
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        raise BenchError(f"no span files (*.jsonl) in {directory}")
    for path in files:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    groups = json.loads(line)["resourceSpans"]
                except (ValueError, KeyError):
                    raise BenchError(f"{path}, line {number}: not an OTLP trace") from None
                yield from (
                    _step_of_span(span)
                    for group in groups
                    for scope in group["scopeSpans"]
                    for span in scope["spans"]
                    if span["name"] == "engine.step"
                )


def _step_of_span(span: Mapping[str, Any]) -> Step:
    facts = {item["key"]: item["value"] for item in span["attributes"]}
    ids = facts["slotserve.step.request_ids"]["arrayValue"]["values"]
    return Step(
        facts["slotserve.engine"]["stringValue"],
        int(facts["slotserve.step.number"]["intValue"]),
        (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9,
        int(facts["slotserve.step.rows.prefill"]["intValue"]),
        int(facts["slotserve.step.rows.decode"]["intValue"]),
        int(facts["slotserve.requests.waiting"]["intValue"]),
        [value["stringValue"] for value in ids],
    )


def _fetch(url: str, seconds: float, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/trace", params={"seconds": seconds}, headers=headers, timeout=60)
    except httpx.HTTPError as error:
        raise BenchError(f"cannot reach {url}: {error}") from error
    if not answer.is_success:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = answer.text[:200]
        raise BenchError(f"{url}/trace answered {answer.status_code}: {message}")
    trace: dict[str, Any] = answer.json()
    return trace


def _record(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = bare.load(args.model)
    bare.warm_up(model)
    work = workload.chosen(args, max_len=args.max_len)
    engine = bare.build(model, slots=args.slots, max_len=args.max_len, mode=args.mode)
    report.say(str(work))
    with report.progress("tokens", work.output_tokens) as advance:
        done = bare.drive(engine, work, advance=advance)
    slowest = max(done.records, key=lambda record: record.seconds)
    return chrome_trace({0: done.records}, marks={(0, slowest.number): "slowest step"})


def _names(requests: list[str]) -> str:
    more = f" and {len(requests) - SHOWN} more" if len(requests) > SHOWN else ""
    return ", ".join(name[:16] for name in requests[:SHOWN]) + more
