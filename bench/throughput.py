"""How much of the engine's time is the linear layers? The rest is what a scheduler and a cache cost."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter

import torch

from bench import bare, workload
from bench.report import Advance, Report
from engine_actor.engine import Engine
from model.batch import Batch
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from model.transformer import Transformer
from policies.fcfs import Fcfs


class Counting:
    """The model, remembering how many rows and how many logits each forward had."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.calls: Counter[tuple[int, int]] = Counter()

    def row_count(self, rows: int) -> int:
        return self.model.row_count(rows)

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        self.calls[len(batch), len(batch.logit_rows)] += 1
        return self.model.forward(batch, storage)


@torch.inference_mode()
def linear_seconds(model: Transformer, calls: Counter[tuple[int, int]], advance: Advance) -> float:
    """Time the same linear layers alone, once per forward, at the row counts those forwards had."""
    config, weights = model.config, model.weights
    attended = config.n_head * config.head_dim
    total = 0.0
    for (rows, logits), times in sorted(calls.items()):
        body = [
            (
                torch.randn(count, config.hidden_size, device=model.backend.device).to(model.backend.dtype),
                torch.randn(count, attended, device=model.backend.device).to(model.backend.dtype),
                torch.randn(count, config.intermediate_size, device=model.backend.device).to(
                    model.backend.dtype
                ),
            )
            for count in model.row_counts.tiles(rows)
        ]
        head = [
            torch.randn(count, config.hidden_size, device=model.backend.device).to(model.backend.dtype)
            for count in model.head_row_counts.tiles(logits)
        ]
        started = time.perf_counter()
        for _ in range(times):
            for hidden, attention, inner in body:
                for layer in weights.layers:
                    layer.qkv(hidden)
                    layer.output(attention)
                    layer.gate_up(hidden)
                    layer.down(inner)
            for hidden in head:
                weights.head(hidden)
        if model.backend.device.type == "cuda":
            torch.cuda.synchronize()
        total += time.perf_counter() - started
        advance(times)
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--slots", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=3, help="engine and layers in turn; default: %(default)s"
    )
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; default: the packaged model")


def run(args: argparse.Namespace) -> int:
    report = Report("throughput", args.out)
    model = bare.load(args.model)
    work = workload.preset("default", requests=args.requests, vocab=model.vocab_size)
    rows: list[tuple[float, float, float]] = []
    for turn in range(1, args.rounds + 1):
        counting = Counting(model)
        engine = Engine(ModelExecutor(counting, model.new_storage(args.slots, 2048)), Fcfs())
        with report.progress(f"engine {turn}/{args.rounds}", work.output_tokens) as advance:
            run = bare.drive(engine, work, advance=advance)
        with report.progress(f"linear layers {turn}/{args.rounds}", counting.calls.total()) as advance:
            alone = linear_seconds(model, counting.calls, advance)
        computing = sum(record.seconds for record in run.records)
        rows.append((run.tokens_per_s, computing, alone))
    ratios = [computing / alone for _, computing, alone in rows]
    report.table(
        f"{work}; {args.slots} slots",
        ["round", "output tokens/s", "engine s", "linear layers s", "ratio"],
        [(i + 1, *row, ratio) for i, (row, ratio) in enumerate(zip(rows, ratios, strict=True))],
    )
    report.note(
        "The ratio is the engine's whole time over that of its matrix products, timed in the same run."
    )
    report.at_most("engine time / linear layers' time", statistics.median(ratios), 1.6, "x")
    return report.finish(
        {
            "tokens_per_s": statistics.median(row[0] for row in rows),
            "ratio_to_linear": statistics.median(ratios),
            "rounds": [
                {"tokens_per_s": tokens, "engine_seconds": engine, "linear_seconds": linear}
                for tokens, engine, linear in rows
            ],
        }
    )
