"""Prompts that arrive together: one by one, in one ragged forward, padded to the longest, or in chunks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from bench import bare, chart, options
from bench.report import Report
from bench.samples import in_turns
from bench.workload import Item, Workload
from engine_actor.scheduler import Mode


@dataclass(frozen=True)
class Way:
    """How prompts that arrive together are prefilled."""

    mode: Mode
    colour: str
    padded: bool = False
    """The control: every prompt as long as the longest, as a rectangular batch would have it."""


WAYS = {
    "separate": Way("separate", chart.STATIC),
    "batched, padded": Way("batched", chart.MUTED, padded=True),
    "batched, ragged": Way("batched", chart.PALETTE[2]),
    "chunked": Way("chunked", chart.CONTINUOUS),
}
ARRIVALS = (1, 2, 4, 8, 16)
TITLES = (("mean", "mean"), ("last", "max"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    options.add_workload(parser)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is reported")


def run(args: argparse.Namespace) -> int:
    report = Report("prefill", args.out)
    model = bare.load(args.model)
    pool = options.workload(args, max_len=args.max_len, vocab=model.vocab_size).arriving(None)
    found: list[dict[str, Any]] = []

    def play(items: Iterable[Item], way: Way) -> bare.Run:
        items = tuple(replace(item, output_tokens=1) for item in items)
        if way.padded:
            longest = max(len(item.prompt) for item in items)
            items = tuple(replace(i, prompt=i.prompt + (0,) * (longest - len(i.prompt))) for i in items)
        engine = bare.build(model, slots=args.slots, max_len=args.max_len, mode=way.mode)
        return bare.drive(engine, Workload("together", items))

    for count in (count for count in ARRIVALS if count <= min(args.slots, len(pool))):
        items = pool.items[:count]
        turns = in_turns({name: partial(play, items, way) for name, way in WAYS.items()}, args.rounds)
        tokens = sum(len(item.prompt) for item in items)
        found.append({"arrivals": count, "prompt_tokens": tokens})
        for name, runs in turns.items():
            found[-1][name] = {
                "ttft_mean": median(float(r.summary()["ttft_mean"]) for r in runs),
                "ttft_max": median(float(r.summary()["ttft_max"]) for r in runs),
                "rows_computed": sum(record.padded_rows for record in runs[0].records),
                "steps": len(runs[0].records),
            }
        report.save({"arrivals": found})
    report.table(
        "Seconds until the average and the last of them has its first token",
        ["together", "prompt tokens", *(f"{name} {what}" for name in WAYS for what, _ in TITLES)],
        [
            [row["arrivals"], row["prompt_tokens"]]
            + [row[name][f"ttft_{key}"] for name in WAYS for _, key in TITLES]
            for row in found
        ],
    )
    with report.chart(columns=2, size=(11, 5)) as (_, panels):
        for axes, (title, key) in zip(panels, TITLES, strict=True):
            for name, way in WAYS.items():
                heights = [row[name][f"ttft_{key}"] for row in found]
                style = "o--" if way.padded else "o-"
                axes.plot([row["arrivals"] for row in found], heights, style, color=way.colour, label=name)
            chart.doublings(axes, [row["arrivals"] for row in found])
            axes.set(title=f"TTFT, {title}", xlabel="prompts that arrive together", ylabel="seconds")
            axes.set_ylim(0, 1.05 * max(row[name]["ttft_max"] for row in found for name in WAYS))
        panels[0].legend(loc="upper left")
    report.note(
        "What to see: padding computes rows that nobody asked for; a ragged batch computes none. Chunks "
        "deliver the first prompts early and cost the last one little."
    )
    most = found[-1]
    report.at_most(
        f"{most['arrivals']} prompts: ragged / padded time to the last first token",
        most["batched, ragged"]["ttft_max"] / most["batched, padded"]["ttft_max"],
        1.0,
    )
    return report.finish({"arrivals": found})
