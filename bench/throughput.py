"""How much of the engine's time is the linear layers? The rest is what a scheduler and a cache cost."""

from __future__ import annotations

import argparse
from statistics import median

from bench import bare, options, workload
from bench.report import Report
from bench.samples import in_turns
from bench.stopwatch import PARTS, stopwatch

BAR = 1.6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="without and with a stopwatch (default: 3)")


def run(args: argparse.Namespace) -> int:
    report = Report("throughput", args.out)
    model = bare.load(args.model)
    work = workload.preset("default", requests=args.requests, vocab=model.vocab_size)

    def play() -> bare.Run:
        engine = bare.build(model, slots=args.slots, max_len=args.max_len)
        with report.progress("tokens", work.output_tokens) as advance:
            return bare.drive(engine, work, advance=advance)

    def timed() -> tuple[float, float]:
        with stopwatch(model) as seconds:
            records = play().records
        return sum(record.seconds for record in records), sum(seconds[part] for part in PARTS[:2])

    turns = in_turns({"plain": lambda: (play().tokens_per_s, 0.0), "timed": timed}, args.rounds)
    rounds = [
        {"tokens_per_s": rate, "engine_seconds": engine, "linear_seconds": linear, "ratio": engine / linear}
        for (rate, _), (engine, linear) in zip(turns["plain"], turns["timed"], strict=True)
    ]
    columns = (
        "output tokens/s: tokens_per_s | engine s: engine_seconds | linear layers s: linear_seconds | ratio"
    )
    report.records(f"{work}; {args.slots} slots", rounds, columns)
    report.note(
        "The ratio is the engine's whole time over that of its matrix products (the output head's included), "
        "timed inside the same run. Tokens/s are those of a run of its own, without a stopwatch."
    )
    ratio = median(row["ratio"] for row in rounds)
    report.at_most("engine time / linear layers' time", ratio, BAR, "x")
    tokens_per_s = median(row["tokens_per_s"] for row in rounds)
    return report.finish({"tokens_per_s": tokens_per_s, "ratio_to_linear": ratio, "rounds": rounds})
