"""What watching costs: tokens/s with every span recorded and sent, against nobody watching at all.

One engine under one load that repeats itself exactly, in blocks that alternate between unwatched,
watched with spans to files, and watched with spans to an OTLP collector. A watched block is over when
its last span is out, so that no cost slips into the next one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.util.metrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter

from bench.bare import add_arguments as add_engine_arguments
from bench.bare import build, load, warm_up
from bench.report import Report
from engine_actor.engine import Engine
from engine_actor.metrics import EngineMetrics
from engine_actor.request import Request
from engine_actor.span_export import JsonLinesExporter, SpanSink, service_resource
from engine_actor.telemetry import Telemetry
from model.executor import SamplingParams

BAR = 0.98
PROMPT_TOKENS = 32
BLOCK_STEPS = 64
"""Steps of a block, and output tokens of a request: every request of a block is replaced once in it."""

COLLECTOR = """
import http.server, sys
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass
class Load:
    """One request leaves and one arrives every few steps, so that every block does the same work."""

    engine: Engine
    started: int = 0
    open: dict[str, Request] = field(default_factory=dict)

    def step(self, telemetry: Telemetry | None) -> None:
        every = BLOCK_STEPS // self.engine.slots.count
        if self.engine.steps % every == 0 and len(self.open) < self.engine.slots.count:
            self._arrive(telemetry)
        outputs, record = self.engine.step()
        if telemetry is not None:
            telemetry.on_step(record)
        for output in outputs:
            if output.finish_reason is not None:
                request = self.open.pop(output.request_id)
                if telemetry is not None:
                    telemetry.on_end(request)

    def _arrive(self, telemetry: Telemetry | None) -> None:
        self.started += 1
        request = Request(
            f"chatcmpl-{self.started:032x}",
            [(self.started * 31 + index) % self.engine.executor.vocab_size for index in range(PROMPT_TOKENS)],
            SamplingParams(max_tokens=BLOCK_STEPS - 1, temperature=0.0, ignore_eos=True),
            arrival=time.monotonic(),
            trace_context={"traceparent": f"00-{self.started:032x}-{self.started:016x}-01"},
        )
        self.open[request.id] = request
        if telemetry is not None:
            telemetry.on_submit(request)
        self.engine.submit(request)


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
    metrics = EngineMetrics(name, {"mode": "chunked"}, ray.util.metrics)
    telemetry = Telemetry(name, metrics, sink, policy="fcfs")
    try:
        yield Watcher(telemetry, sink)
    finally:
        telemetry.close()
        sink.shutdown()


@contextmanager
def collector() -> Iterator[str]:
    """An OTLP endpoint in a process of its own that takes everything."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
    finally:
        process.kill()
        process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--rounds", type=int, default=24, help="blocks of each kind (default: 24)")


def run(args: argparse.Namespace) -> int:
    report = Report("tracing", args.out)
    model = load(args.model)
    warm_up(model)
    work = Load(build(model, slots=args.slots, max_len=args.max_len))
    blocks: dict[str, list[Block]] = {"unwatched": [], "files": [], "collector": []}
    with tempfile.TemporaryDirectory() as directory, collector() as url:
        files = JsonLinesExporter(Path(directory), "bench")
        with watcher(files, "files") as first, watcher(OTLPSpanExporter(url), "collector") as second:
            watchers = {"unwatched": None, "files": first, "collector": second}
            for _ in range(2 * BLOCK_STEPS):
                work.step(None)
            rng = random.Random(0)
            with report.progress("blocks", 3 * args.rounds) as advance:
                for _ in range(args.rounds):
                    for kind in rng.sample(list(watchers), len(watchers)):
                        blocks[kind].append(_block(work, watchers[kind]))
                        advance()
            spans = {kind: w.sink.exported for kind, w in watchers.items() if w is not None}
            dropped = first.sink.dropped + second.sink.dropped
    return _finish(report, blocks, spans, dropped, args.slots)


def _block(work: Load, watching: Watcher | None) -> Block:
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(BLOCK_STEPS):
        work.step(None if watching is None else watching.telemetry)
    if watching is not None:
        watching.drain()
    return Block(time.perf_counter() - started, time.process_time() - cpu_started)


def _finish(
    report: Report, blocks: dict[str, list[Block]], spans: dict[str, int], dropped: int, slots: int
) -> int:
    seconds = {kind: [block.seconds for block in found] for kind, found in blocks.items()}
    ratios = {
        kind: [off / on for off, on in zip(seconds["unwatched"], seconds[kind], strict=True)]
        for kind in ("files", "collector")
    }
    cpu = {kind: statistics.median(block.cpu_seconds for block in found) for kind, found in blocks.items()}
    medians = {kind: statistics.median(values) for kind, values in ratios.items()}
    tokens = slots * (BLOCK_STEPS - 1)
    rows = [
        [
            "unwatched" if kind == "unwatched" else f"spans to {kind}",
            tokens / statistics.median(seconds[kind]),
            medians.get(kind, 1.0),
            cpu[kind] / tokens * 1e3,
            spans.get(kind, 0),
        ]
        for kind in seconds
    ]
    columns = ["", "tokens/s", "median ratio", "CPU ms per token", "spans"]
    report.table("What watching costs", columns, rows)
    report.note(
        "A ratio of 1 means that watching costs nothing; it is the median over pairs of blocks. "
        "CPU time tells the same on a machine that is busy with other things."
    )
    with report.chart(size=(9, 4.2)) as (_, axes):
        for height, (kind, values) in enumerate(ratios.items()):
            axes.scatter(values, [height] * len(values), s=70, alpha=0.75)
            axes.plot([medians[kind]] * 2, [height - 0.25, height + 0.25], color="black")
            axes.text(medians[kind], height + 0.3, f"{medians[kind]:.3f}", ha="center")
        axes.axvline(BAR, linestyle="--", color="gray")
        axes.annotate(f"bar {BAR} ", (BAR, 1.6), ha="right", color="gray")
        axes.set_yticks(range(len(ratios)), [f"spans to {kind}" for kind in ratios])
        axes.set_ylim(-0.6, 1.8)
        axes.set_xlabel("tokens/s watched / unwatched, one dot per pair of blocks")
        axes.set_title("All spans on, against nobody watching")
    data: dict[str, Any] = {
        "ratio": min(medians.values()),
        "ratios": ratios,
        "seconds": seconds,
        "cpu_seconds": {kind: [block.cpu_seconds for block in found] for kind, found in blocks.items()},
    }
    report.at_least("tokens/s with all spans on / unwatched", data["ratio"], BAR)
    return report.finish(data | {"spans": spans, "dropped": dropped})
