"""Where a step's time goes, item by item, against what this machine could do at best."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch

from bench import bare, chart, client, observed, options
from bench.chart import CONTINUOUS, STATIC
from bench.lengths import fixed
from bench.report import Report
from bench.serving import served
from bench.stopwatch import PARTS, stopwatch, wait
from bench.workload import Shape, Workload, build
from engine_actor.clock import wall
from engine_actor.records import StepRecord
from model.stored_tensor import StoredTensor
from model.transformer import Transformer

CONTEXT, OUTPUT = 128, 48
"""Tokens of each prompt and answer: the decode steps measured read 128 to 176 cached positions a row."""
ITEMS = (*PARTS, "sampling", "scheduling", "Python between", "transport")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--no-serve", action="store_true", help="leave transport out: no server is started")


def run(args: argparse.Namespace) -> int:
    report = Report("gap", args.out)
    model = bare.load(args.model)
    machine = Roofline.measure(model)
    plain = mean(record.seconds for record in _decode(model, args.slots, args.max_len))
    with stopwatch(model) as spent:
        steps = _decode(model, args.slots, args.max_len, spent.clear)
    timed = mean(record.seconds for record in steps)
    phases = {p: mean(r.phases.get(p, 0.0) for r in steps) for p in ("admit", "sample", "retire")}
    items: dict[str, float] = {part: spent[part] / len(steps) for part in PARTS}
    items |= {"sampling": phases["sample"], "scheduling": phases["admit"] + phases["retire"]}
    items["Python between"] = timed - sum(items.values())
    items["transport"] = 0.0 if args.no_serve else _transport(args, report)
    ideal = machine.ideal(model, args.slots, CONTEXT + OUTPUT // 2)
    data: dict[str, Any] = {"step": plain, "step_with_stopwatch": timed, "items": items}
    data |= {"ideal": ideal, "roofline": vars(machine)}
    if model.backend.device.type == "cuda":
        data["cuda"] = _cuda(model, args)
    step = timed + items["transport"]
    report.records(
        f"A decode step of {args.slots} requests; seconds",
        [
            {"item": name, "measured": t, "share": t / step, "best": ideal.get(name)}
            | {"by_best": t / ideal[name] if name in ideal else None}
            for name, t in [*items.items(), ("step", step)]
        ],
        "item | measured | share | at best: best | measured / at best: by_best",
    )
    report.note(
        f"Timing the parts made the step {timed / plain - 1:+.1%} longer than the {1000 * plain:.1f} ms it "
        "takes untimed."
    )
    report.note(
        f"At best: each weight and cached key read once at {machine.bytes_per_s / 1e9:.0f} GB/s, each "
        f"product at {machine.flops_per_s / 1e9:.0f} GFLOP/s, whichever takes longer. Both were measured "
        "just now, products with large square matrices: the faster of a plain one and a layer's."
    )
    with report.chart(size=(10, 5.2)) as (_, axes):
        millis = {name: 1000 * seconds for name, seconds in items.items()}
        labels = [f"{value:.2f} ms" for value in millis.values()]
        chart.rows(axes, millis, labels, [CONTINUOUS] * len(items))
        best = [1000 * ideal[name] if name in ideal else float("nan") for name in items]
        heights = range(len(items))
        low, high = [h - 0.4 for h in heights], [h + 0.4 for h in heights]
        axes.vlines(best, low, high, color=STATIC, linewidth=3, label="at best: this machine's roofline")
        axes.legend(loc="lower right")
        axes.set(xlim=(0, 1.15 * max(millis.values())), xlabel="milliseconds of a decode step")
        axes.set_title("Where a step's time goes")
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
        layer = model.backend.linear([StoredTensor.of("square", a)])
        multiplying = min(_best(lambda: a @ a, model), _best(lambda: layer(a), model))
        return cls(buffer.nbytes / _best(buffer.sum, model), 2 * size**3 / multiplying)

    def ideal(self, model: Transformer, rows: int, context: int) -> dict[str, float]:
        """Seconds at best for a decode step's items of `rows` requests with `context` cached tokens."""
        config, item = model.config, model.backend.dtype.itemsize
        attended, cached = (heads * config.head_dim for heads in (config.n_head, config.n_kv_head))
        layer = config.hidden_size * (2 * attended + 2 * cached + 3 * config.intermediate_size)
        head = config.hidden_size * config.vocab_size
        keys = 2 * config.n_layer * rows * context * cached
        scores = 4 * config.n_layer * rows * context * attended

        def slower(numbers: float, flops: float) -> float:
            return max(numbers * item / self.bytes_per_s, flops / self.flops_per_s)

        return {
            "linear layers": slower(config.n_layer * layer, 2 * config.n_layer * layer * rows),
            "output head": slower(head, 2 * head * rows),
            "attention": slower(keys, scores),
        }


def _load(slots: int, vocab: int) -> Workload:
    return build(Shape(slots, fixed(CONTEXT), fixed(OUTPUT)), "decode", vocab=vocab)


def _decode(
    model: Transformer, slots: int, max_len: int, on_prefill: Callable[[], object] = lambda: None
) -> list[StepRecord]:
    """Prefill every slot at once, then decode in step: the decode steps."""

    def on_step(record: StepRecord) -> None:
        if any(share.kind == "prefill" for share in record.shares):
            on_prefill()

    engine = bare.build(model, slots=slots, max_len=max_len, mode="batched")
    run = bare.drive(engine, _load(slots, model.vocab_size), on_step=on_step)
    return [record for record in run.records if all(share.kind == "decode" for share in record.shares)]


def _transport(args: argparse.Namespace, report: Report) -> float:
    """Seconds a step of a served engine waits for something other than its own work."""
    settings = {"max_num_seqs": args.slots, "max_len": args.max_len, "model": args.model, "mode": "batched"}
    with served(settings) as server:
        here = client.Endpoint(server.url)
        run = client.drive(here, _load(args.slots, vocab=49_152))
        trace = observed.fetch(here, 60, report.out / "gap-served.trace.json")
    seen = observed.cut(trace, wall(run.started), wall(run.ended))
    full = [step for step in seen.steps if len(step.requests) == args.slots]
    return max(0.0, median(b.started - a.started - a.seconds for a, b in pairwise(full)))


def _cuda(model: Transformer, args: argparse.Namespace) -> dict[str, float]:
    """Kernel time against wall time of a decode step: what is left is launches and Python."""
    from torch.profiler import ProfilerActivity, profile

    profiled = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
    steps = _decode(model, args.slots, args.max_len, profiled.start)
    wait(model)
    profiled.stop()
    wall_seconds = mean(record.seconds for record in steps)
    kernels = sum(event.self_device_time_total for event in profiled.key_averages()) / 1e6 / len(steps)
    return {"wall": wall_seconds, "kernels": kernels, "launch_gaps": wall_seconds - kernels}


def _best(work: Callable[[], object], model: Transformer) -> float:
    times = []
    for _ in range(8):
        started = time.perf_counter()
        work()
        wait(model)
        times.append(time.perf_counter() - started)
    return min(times)
