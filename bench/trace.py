"""Which step was slow, and who was in it: a trace for ui.perfetto.dev and a list of the slowest steps.

Without options it runs a workload on a bare engine. `--url` asks a running server for what it did
lately; `--spans` reads the span files that a server without a collector writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from bench import bare, observed, options
from bench.client import Endpoint
from bench.observed import Step
from bench.report import BenchError, Report
from engine_actor.chrome_trace import chrome_trace
from engine_actor.scheduler import Mode

SHOWN = 8
"""Steps listed, and requests named in each."""
COLUMNS = ("engine", "step", "ms", "prefill rows", "decode rows", "waiting", "requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    options.add_workload(parser, default="smoke")
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
        path = args.out / "perfetto.json"
        if args.url:
            trace = observed.fetch(Endpoint(args.url, args.api_key), args.seconds, path)
        else:
            trace = _record(args, report)
            path.write_text(json.dumps(trace))
        report.say(f"wrote {path}: open it in https://ui.perfetto.dev (it is not uploaded)")
        steps = observed.steps(trace)
    if not steps:
        raise BenchError("there are no steps in it: nothing has run")
    slowest = sorted(steps, key=lambda step: -step.seconds)[:SHOWN]
    report.table(f"The slowest of {len(steps):,} steps", COLUMNS, map(row, slowest))
    report.note(
        "Many prefill rows in a slow step: a long prompt held everyone up; a smaller max_step_tokens or "
        "mode chunked spreads it out."
    )
    return report.finish({"steps": len(steps), "slowest": [vars(step) for step in slowest]})


def steps_of_spans(directory: Path) -> Iterator[Step]:
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
                scopes = (scope for group in groups for scope in group["scopeSpans"])
                spans = (span for scope in scopes for span in scope["spans"])
                yield from (_step(span) for span in spans if span["name"] == "engine.step")


def _step(span: Mapping[str, Any]) -> Step:
    facts = {item["key"]: item["value"] for item in span["attributes"]}
    started, ended = (int(span[f"{end}TimeUnixNano"]) for end in ("start", "end"))
    ids = facts["slotserve.step.request_ids"]["arrayValue"]["values"]
    return Step(
        facts["slotserve.engine"]["stringValue"],
        int(facts["slotserve.step.number"]["intValue"]),
        started / 1e9,
        (ended - started) / 1e9,
        int(facts["slotserve.step.rows.prefill"]["intValue"]),
        int(facts["slotserve.step.rows.decode"]["intValue"]),
        int(facts["slotserve.requests.waiting"]["intValue"]),
        [value["stringValue"] for value in ids],
    )


def _record(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = bare.load(args.model)
    work = options.workload(args, max_len=args.max_len)
    engine = bare.build(model, slots=args.slots, max_len=args.max_len, mode=args.mode)
    report.say(str(work))
    with report.progress("tokens", work.output_tokens) as advance:
        done = bare.drive(engine, work, advance=advance)
    slowest = max(done.records, key=lambda record: record.seconds)
    return chrome_trace({0: done.records}, marks={(0, slowest.number): "slowest step"})


def row(step: Step) -> tuple[object, ...]:
    """A step under COLUMNS."""
    more = f" and {len(step.requests) - SHOWN} more" if len(step.requests) > SHOWN else ""
    names = ", ".join(name[:16] for name in step.requests[:SHOWN]) + more
    rows = (step.prefill_rows, step.decode_rows)
    return (step.engine, step.number, step.seconds * 1e3, *rows, step.waiting, names)
