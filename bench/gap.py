"""Where a step's time goes, item by item, against what this machine could do at best."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch

from bench import bare, client, observed, options
from bench.chart import CONTINUOUS, INK, PALETTE
from bench.lengths import fixed
from bench.report import Report
from bench.serving import served
from bench.workload import Shape, build
from engine_actor.clock import wall
from engine_actor.engine import Engine
from model.stored_tensor import StoredTensor
from model.transformer import Transformer

CONTEXT, OUTPUT = 128, 48
"""Tokens of each prompt and answer: the decode steps measured read 128 to 176 cached positions a row."""
ITEMS = (
    "linear layers",
    "output head",
    "attention",
    "norms and activation",
    "sampling",
    "scheduling",
    "Python between",
    "transport",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--no-serve", action="store_true", help="leave transport out: no server is started")


def run(args: argparse.Namespace) -> int:
    report = Report("gap", args.out)
    model = bare.load(args.model)
    with report.progress("gap", 3 if args.no_serve else 4) as advance:
        machine = Roofline.measure(model)
        advance()
        plain = _decode(bare.build(model, slots=args.slots, max_len=args.max_len, mode="batched"))
        advance()
        with Stopwatch().on(model) as watch:
            timed = _decode(bare.build(model, slots=args.slots, max_len=args.max_len, mode="batched"), watch)
        advance()
        transport = 0.0
        if not args.no_serve:
            transport = _transport(args, report)
            advance()

    spent = watch.seconds
    items: dict[str, float] = {name: spent[name] / timed.steps for name in ITEMS[:4]}
    items["sampling"] = timed.phases["sample"]
    items["scheduling"] = timed.phases["admit"] + timed.phases["retire"]
    items["Python between"] = timed.step - sum(items.values())
    items["transport"] = transport
    ideal = machine.ideal(model, args.slots, CONTEXT + OUTPUT // 2)
    data: dict[str, Any] = {
        "step": plain.step,
        "step_with_stopwatch": timed.step,
        "items": items,
        "ideal": ideal,
        "roofline": vars(machine),
    }
    if model.backend.device.type == "cuda":
        data["cuda"] = _cuda(model, args)
    report.table(
        f"A decode step of {args.slots} requests (ms)",
        ["item", "measured", "share", "at best", "measured / at best"],
        [
            [
                name,
                1000 * seconds,
                f"{seconds / (timed.step + transport):.1%}",
                1000 * ideal[name] if name in ideal else None,
                seconds / ideal[name] if name in ideal else None,
            ]
            for name, seconds in items.items()
        ]
        + [["step", 1000 * (timed.step + transport), "100 %", 1000 * sum(ideal.values()), None]],
    )
    report.note(
        f"Timing the parts made the step {timed.step / plain.step - 1:+.1%} longer than the "
        f"{1000 * plain.step:.1f} ms it takes untimed."
    )
    report.note(
        f"At best: each weight and cached key read once at {machine.bytes_per_s / 1e9:.0f} GB/s, each "
        f"product at {machine.flops_per_s / 1e9:.0f} GFLOP/s, whichever takes longer. Both were measured "
        "just now, products with large square matrices: the faster of a plain one and a layer's."
    )
    _draw(report, items, ideal)
    return report.finish(data)


@dataclass(frozen=True)
class Roofline:
    """What this machine does at best, measured."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, model: Transformer) -> Roofline:
        """Read a buffer far beyond the caches; multiply large square matrices, plainly and as layers do."""
        device, dtype = model.backend.device, model.backend.dtype
        buffer = torch.ones(2**28, dtype=torch.float32, device=device)
        size = 4096 if device.type == "cuda" else 2048
        a = torch.randn(size, size, device=device).to(dtype)
        reading = _best(lambda: buffer.sum(), device)
        layer = model.backend.linear([StoredTensor.of("square", a)])
        multiplying = min(_best(lambda: a @ a, device), _best(lambda: layer(a), device))
        return cls(buffer.nbytes / reading, 2 * size**3 / multiplying)

    def ideal(self, model: Transformer, rows: int, context: int) -> dict[str, float]:
        """Seconds at best for a decode step's items of `rows` requests with `context` cached tokens."""
        config, item = model.config, model.backend.dtype.itemsize
        attended = config.n_head * config.head_dim
        cached = config.n_kv_head * config.head_dim
        layer = config.hidden_size * (2 * attended + 2 * cached + 3 * config.intermediate_size)
        head = config.hidden_size * config.vocab_size
        keys = 2 * config.n_layer * rows * context * cached
        scores = 4 * config.n_layer * rows * context * attended
        return {
            "linear layers": self._slower(config.n_layer * layer * item, 2 * config.n_layer * layer * rows),
            "output head": self._slower(head * item, 2 * head * rows),
            "attention": self._slower(keys * item, scores),
        }

    def _slower(self, bytes_read: float, flops: float) -> float:
        return max(bytes_read / self.bytes_per_s, flops / self.flops_per_s)


@dataclass
class Stopwatch:
    """Adds up the time inside a model's parts. Waits for the device, so it slows a GPU down."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def on(self, model: Transformer) -> Iterator[Stopwatch]:
        """Time every call of the parts until the block ends."""
        kind = type(model.attention)
        head = model.weights.head
        patched: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, item: Callable[..., str]) -> None:  # noqa: ANN401
            original = getattr(owner, name)

            def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                started = time.perf_counter()
                result = original(*args, **kwargs)
                _wait(model.backend.device)
                self.seconds[item(*args)] += time.perf_counter() - started
                return result

            patched.append((owner, name, original))
            setattr(owner, name, timed)

        patch(type(head), "__call__", lambda it, *_: "output head" if it is head else "linear layers")
        patch(kind, "__call__", lambda *_: "attention")
        patch(kind, "begin", lambda *_: "attention")
        patch(type(model.backend), "add_rms_norm", lambda *_: "norms and activation")
        patch(type(model.backend), "silu_mul", lambda *_: "norms and activation")
        try:
            yield self
        finally:
            for owner, name, original in patched:
                setattr(owner, name, original)


@dataclass(frozen=True)
class Decoded:
    """Mean seconds of a decode step and of its phases."""

    step: float
    phases: dict[str, float]
    steps: int


def _decode(engine: Engine, watch: Stopwatch | None = None) -> Decoded:
    """Prefill every slot at once, then decode in step; only the decode steps count."""
    slots = engine.slots.count
    shape = Shape(slots, fixed(CONTEXT), fixed(OUTPUT))
    load = build(shape, "decode", vocab=engine.executor.vocab_size)
    for item in load.items:
        engine.submit(item.request())
    records = []
    while engine.has_work():
        _, record = engine.step()
        if all(share.kind == "decode" for share in record.shares):
            records.append(record)
        elif watch:
            watch.seconds.clear()
    phases = {p: mean(r.phases.get(p, 0.0) for r in records) for p in ("admit", "sample", "retire")}
    return Decoded(mean(r.seconds for r in records), phases, len(records))


def _transport(args: argparse.Namespace, report: Report) -> float:
    """Seconds a step of a served engine waits for something other than its own work."""
    shape = Shape(args.slots, fixed(CONTEXT), fixed(OUTPUT))
    settings = {"max_num_seqs": args.slots, "max_len": args.max_len, "model": args.model}
    with served(settings | {"mode": "batched"}) as server:
        here = client.Endpoint(server.url)
        run = client.drive(here, build(shape, "decode"))
        trace = observed.fetch(here, 60, report.out / "gap-served.trace.json")
    seen = observed.cut(trace, wall(run.started), wall(run.ended))
    full = [step for step in seen.steps if len(step.requests) == args.slots]
    pauses = [b.started - a.started - a.seconds for a, b in pairwise(full)]
    return max(0.0, median(pauses))


def _cuda(model: Transformer, args: argparse.Namespace) -> dict[str, float]:
    """Kernel time against wall time of a decode step: what is left is launches and Python."""
    from torch.profiler import ProfilerActivity, profile

    engine = bare.build(model, slots=args.slots, max_len=args.max_len)
    shape = Shape(args.slots, fixed(CONTEXT), fixed(OUTPUT))
    for item in build(shape, "decode", vocab=model.vocab_size).items:
        engine.submit(item.request())
    while any(r.num_output < 4 for r in engine.requests.values()):
        engine.step()
    steps = 10
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        _wait(model.backend.device)
        wall = (time.perf_counter() - started) / steps
    events = profiled.key_averages()
    kernels = sum(event.self_device_time_total for event in events) / 1e6 / steps
    return {"wall": wall, "kernels": kernels, "launch_gaps": wall - kernels}


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(8):
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _draw(report: Report, items: dict[str, float], ideal: dict[str, float]) -> None:
    with report.chart(size=(10, 5.2)) as (_, axes):
        names = list(items)[::-1]
        bars = axes.barh(names, [1000 * items[n] for n in names], color=CONTINUOUS, height=0.62)
        for bar, name in zip(bars, names, strict=True):
            axes.annotate(
                f" {1000 * items[name]:.2f} ms",
                (bar.get_width(), bar.get_y() + bar.get_height() / 2),
                va="center",
                color=INK,
            )
            if name in ideal:
                at = 1000 * ideal[name]
                axes.plot([at, at], [bar.get_y() - 0.08, bar.get_y() + 0.7], color=PALETTE[1], linewidth=3)
        axes.plot([], [], color=PALETTE[1], linewidth=3, label="at best: this machine's roofline")
        axes.legend(loc="lower right")
        axes.set_xlim(0, 1.15 * 1000 * max(items.values()))
        axes.set_xlabel("milliseconds of a decode step")
        axes.set_title("Where a step's time goes")
        axes.grid(axis="y", visible=False)
