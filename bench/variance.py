"""The gain of continuous over static batching against the spread of output lengths, on a bare engine."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np

from bench import bare, workload
from bench.chart import CONTINUOUS, MUTED, STATIC
from bench.lengths import Spread, fixed
from bench.report import Report
from bench.samples import in_turns
from bench.workload import Shape
from policies import load_policy

SIDES: dict[str, dict[str, Any]] = {
    "continuous": {"policy": "fcfs", "mode": "chunked"},
    # Fair to the old way: a batch takes all that waits, prefills it in one go, streams every token,
    # and makes room as soon as its last request is done.
    "static": {"policy": "static", "mode": "batched"},
}
VARIATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
ROUNDS = 3
"""Turns of each side per variation: a run takes seconds, so that one disturbance would decide it."""
MEAN = 24


def run(args: argparse.Namespace) -> int:
    report = Report("compare-variance", args.out)
    model = bare.load(args.model)
    count = args.requests or 48
    rows: list[dict[str, float]] = []
    with report.progress("sweep", ROUNDS * len(SIDES) * count * MEAN * len(VARIATIONS)) as advance:
        for variation in VARIATIONS:
            shape = Shape(count, fixed(16), Spread(MEAN, variation, 24 * MEAN))
            load = workload.build(shape, f"variation {variation:g}", seed=args.seed, vocab=model.vocab_size)

            def play(side: str, load: workload.Workload) -> bare.Run:
                settings = SIDES[side] | {"policy": load_policy(SIDES[side]["policy"])}
                engine = bare.build(model, slots=args.slots, max_len=args.max_len, **settings)
                return bare.drive(engine, load, advance=advance)

            turns = in_turns({side: partial(play, side, load) for side in SIDES}, ROUNDS)
            lengths = [item.output_tokens for item in load.items]
            row: dict[str, float] = {"variation": float(np.std(lengths) / np.mean(lengths))}
            for side, runs in turns.items():
                row[f"{side}_tokens_per_s"] = statistics.median(run.tokens_per_s for run in runs)
                row[f"{side}_steps"] = len(runs[0].records)
            row["gain"] = row["continuous_tokens_per_s"] / row["static_tokens_per_s"]
            row["fewer_steps"] = row["static_steps"] / row["continuous_steps"]
            rows.append(row)
            report.save({"sweep": rows})
    title = f"{count} requests of {MEAN} output tokens on average, {args.slots} slots"
    report.records(
        title,
        rows,
        "std / mean of output lengths: variation | static tokens/s: static_tokens_per_s | "
        "continuous tokens/s: continuous_tokens_per_s | gain | steps saved: fewer_steps",
    )
    with report.chart() as (_, axes):
        variations = [row["variation"] for row in rows]
        axes.plot(variations, [r["gain"] for r in rows], "o-", color=CONTINUOUS, label="tokens/s, measured")
        axes.plot(variations, [r["fewer_steps"] for r in rows], "--", color=MUTED, label="steps saved")
        axes.axhline(1, color=STATIC, linewidth=1.5)
        axes.annotate("static batching", (variations[-1], 1), ha="right", va="bottom", color=STATIC)
        axes.set(ylim=(0, None), xlim=(0, None), ylabel="continuous / static")
        axes.set_xlabel("spread of the output lengths: standard deviation / mean")
        axes.set_title("The gain is the variance: equal lengths leave nothing to win")
        axes.legend(loc="upper left")
    report.note(
        "What to see: where all answers are equally long a static batch wastes nothing; the more they "
        "differ, the longer its slots wait for the longest."
    )
    report.at_most("gain at no variance", rows[0]["gain"], 1.15, "x")
    report.at_least("gain at the largest variance / at none", rows[-1]["gain"] / rows[0]["gain"], 1.5, "x")
    return report.finish({"sweep": rows})
