"""What watching costs: tokens/s with every span recorded and sent, against nobody watching at all.

One engine does the same work in blocks that take turns: unwatched, watched with spans to files, and
watched with spans to an OTLP collector. A watched block is over when its last span is out, so that no
cost slips into the next one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import httpx
import ray.util.metrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter

from app.haproxy import free_port
from bench import bare, chart, options
from bench.chart import MUTED
from bench.lengths import fixed
from bench.report import Report
from bench.samples import Pairs, in_turns
from bench.workload import Item, Shape, Workload, build
from engine_actor.engine import Engine
from engine_actor.history import StepHistory
from engine_actor.metrics import EngineMetrics
from engine_actor.request import Request
from engine_actor.span_export import JsonLinesExporter, SpanSink, service_resource
from engine_actor.spans import SpanRecorder
from engine_actor.telemetry import Telemetry

BAR = 0.98
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 63
"""Of the requests of a block, one for each slot."""
MOST_ROUNDS = 60

COLLECTOR = """
import sys
from aiohttp import web
async def take(request):
    await request.read()
    return web.Response()
app = web.Application()
app.router.add_post("/v1/traces", take)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


class Traced(Item):
    """It comes with a caller's span, as most requests of a traced service do."""

    def request(self, start: float = 0.0) -> Request:
        request = Item.request(self, start)
        number = 1 + int(self.id[1:])
        request.trace_context = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        return request


@dataclass(frozen=True)
class Block:
    """What a block of steps took."""

    seconds: float
    cpu_seconds: float


@dataclass
class Watcher:
    """Telemetry as an engine actor has it, Ray's metrics included."""

    telemetry: Telemetry
    sink: SpanSink

    def drain(self) -> None:
        self.telemetry.flush()
        self.sink.force_flush()


@contextmanager
def watcher(exporter: SpanExporter, name: str) -> Iterator[Watcher]:
    sink = SpanSink(exporter, name, service_resource(name, "bench"))
    telemetry = Telemetry(
        StepHistory(name),
        EngineMetrics(name, {"mode": "chunked"}),
        SpanRecorder(name, sink, policy="fcfs"),
        mirror=ray.util.metrics.Gauge,
    )
    try:
        yield Watcher(telemetry, sink)
    finally:
        telemetry.close()


@contextmanager
def collector() -> Iterator[str]:
    """An OTLP endpoint in a process of its own that takes everything."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR, str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with suppress(httpx.HTTPError):
                httpx.get(url)
                break
            time.sleep(0.05)
        yield f"{url}/v1/traces"
    finally:
        process.kill()
        process.wait()


def block(engine: Engine, work: Workload, watching: Watcher | None) -> Block:
    started, cpu_started = time.perf_counter(), time.process_time()
    bare.drive(engine, work, telemetry=None if watching is None else watching.telemetry)
    if watching is not None:
        watching.drain()
    return Block(time.perf_counter() - started, time.process_time() - cpu_started)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--rounds", type=int, default=24, help="blocks of each kind, or more (default: 24)")


def run(args: argparse.Namespace) -> int:
    report = Report("tracing", args.out)
    model = bare.load(args.model)
    engine = bare.build(model, slots=args.slots, max_len=args.max_len)
    shape = Shape(args.slots, fixed(PROMPT_TOKENS), fixed(OUTPUT_TOKENS))
    items = build(shape, "block", vocab=model.vocab_size).items
    work = Workload("block", tuple(Traced(i.id, i.arrival, i.prompt, i.output_tokens) for i in items))
    with tempfile.TemporaryDirectory() as directory, collector() as url:
        files = JsonLinesExporter(Path(directory), "bench")
        with watcher(files, "files") as first, watcher(OTLPSpanExporter(url), "collector") as second:
            watchers = {"unwatched": None, "files": first, "collector": second}
            sides = {kind: partial(block, engine, work, watching) for kind, watching in watchers.items()}
            blocks = in_turns(
                sides,
                args.rounds,
                at_most=max(args.rounds, MOST_ROUNDS),
                settled=lambda blocks: all(pairs.clear_of(BAR) for pairs in _ratios(blocks).values()),
            )
            spans = {kind: w.sink.exported for kind, w in watchers.items() if w is not None}
            dropped = first.sink.dropped + second.sink.dropped
    ratios = _ratios(blocks)
    seconds = {kind: [block.seconds for block in found] for kind, found in blocks.items()}
    cpu = {kind: [block.cpu_seconds for block in found] for kind, found in blocks.items()}
    report.records(
        "What watching costs",
        [
            {"name": name, "tokens/s": work.output_tokens / median(seconds[name])}
            | {"ms": 1000 * median(cpu[name]) / work.output_tokens, "spans": spans.get(name, 0)}
            | {"ratio": ratios[name].median if name in ratios else 1.0}
            for name in blocks
        ],
        "watched: name | tokens/s | median ratio: ratio | CPU ms per token: ms | spans",
    )
    told = "; ".join(f"spans to {kind} {pairs}" for kind, pairs in ratios.items())
    report.note(
        f"A ratio of 1 means that watching costs nothing: {told}. "
        "CPU time tells the same on a machine that is busy with other things."
    )
    with report.chart(size=(9, 4.2)) as (_, axes):
        marks = {f"spans to {kind}": {f"{pairs.median:.3f}": pairs.median} for kind, pairs in ratios.items()}
        chart.dots(axes, {f"spans to {kind}": pairs.values for kind, pairs in ratios.items()}, marks)
        axes.axvline(BAR, linestyle="--", color=MUTED)
        axes.annotate(f"bar {BAR} ", (BAR, 1.4), ha="right", color=MUTED)
        axes.set_xlabel("tokens/s watched / unwatched, one dot per pair of blocks")
        axes.set_title("All spans on, against nobody watching")
    worse = min(pairs.median for pairs in ratios.values())
    report.at_least("tokens/s with all spans on / unwatched", worse, BAR)
    return report.finish(
        {
            "ratio": worse,
            "ratios": {kind: pairs.values for kind, pairs in ratios.items()},
            "seconds": seconds,
            "cpu_seconds": cpu,
            "spans": spans,
            "dropped": dropped,
        }
    )


def _ratios(blocks: dict[str, list[Block]]) -> dict[str, Pairs]:
    seconds = {kind: [block.seconds for block in found] for kind, found in blocks.items()}
    unwatched = seconds.pop("unwatched")
    return {kind: Pairs.ratios(unwatched, found) for kind, found in seconds.items()}
