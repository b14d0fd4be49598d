"""Prompts that arrive together: one by one, in one ragged forward, padded to the longest, or in chunks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench import bare, workload
from bench.report import CONTINUOUS, MUTED, PALETTE, STATIC, Report
from bench.workload import Workload
from engine_actor.scheduler import Mode
from model.transformer import Transformer


@dataclass(frozen=True)
class Way:
    """How prompts that arrive together are prefilled."""

    mode: Mode
    colour: str
    padded: bool = False
    """The control: every prompt as long as the longest, as a rectangular batch would have it."""


WAYS = {
    "separate": Way("separate", STATIC),
    "batched, padded": Way("batched", MUTED, padded=True),
    "batched, ragged": Way("batched", PALETTE[2]),
    "chunked": Way("chunked", CONTINUOUS),
}
ARRIVALS = (1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bare.add_arguments(parser)
    workload.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is reported")


def run(args: argparse.Namespace) -> int:
    report = Report("prefill", args.out)
    model = bare.load(args.model)
    bare.warm_up(model)
    pool = workload.chosen(args, max_len=args.max_len, vocab=model.vocab_size).arriving(None)
    counts = [count for count in ARRIVALS if count <= min(args.slots, len(pool))]
    rows: list[dict[str, Any]] = []
    with report.progress("prefill", len(counts) * args.rounds * len(WAYS)) as advance:
        for count in counts:
            load = Workload("together", tuple(replace(i, output_tokens=1) for i in pool.items[:count]))
            runs: dict[str, list[bare.Run]] = {name: [] for name in WAYS}
            for _ in range(args.rounds):
                for name, way in WAYS.items():
                    runs[name].append(_prefill(model, args, load, way))
                    advance()
            row: dict[str, Any] = {"arrivals": count, "prompt_tokens": load.prompt_tokens}
            for name, done in runs.items():
                row[name] = {
                    "ttft_mean": median(float(r.summary()["ttft_mean"]) for r in done),
                    "ttft_max": median(float(r.summary()["ttft_max"]) for r in done),
                    "rows_computed": sum(record.padded_rows for record in done[0].records),
                    "steps": len(done[0].records),
                }
            rows.append(row)
            report.save({"arrivals": rows})
    report.table(
        "Seconds until the average and the last of them has its first token",
        ["together", "prompt tokens", *(f"{name} {what}" for name in WAYS for what in ("mean", "last"))],
        [
            [r["arrivals"], r["prompt_tokens"]]
            + [r[name][key] for name in WAYS for key in ("ttft_mean", "ttft_max")]
            for r in rows
        ],
    )
    _draw(report, rows)
    report.note(
        "What to see: padding computes rows that nobody asked for; a ragged batch computes none. Chunks "
        "deliver the first prompts early and cost the last one little."
    )
    most = rows[-1]
    report.at_most(
        f"{most['arrivals']} prompts: ragged / padded time to the last first token",
        most["batched, ragged"]["ttft_max"] / most["batched, padded"]["ttft_max"],
        1.0,
    )
    return report.finish({"arrivals": rows})


def _prefill(model: Transformer, args: argparse.Namespace, load: Workload, way: Way) -> bare.Run:
    if way.padded:
        longest = max(len(item.prompt) for item in load.items)
        filled = (replace(i, prompt=i.prompt + (0,) * (longest - len(i.prompt))) for i in load.items)
        load = Workload("padded", tuple(filled))
    return bare.drive(bare.build(model, slots=args.slots, max_len=args.max_len, mode=way.mode), load)


def _draw(report: Report, rows: list[dict[str, Any]]) -> None:
    titles = {"ttft_mean": "on average", "ttft_max": "for the last of them"}
    with report.chart(columns=2, size=(11, 5)) as (_, panels):
        counts = [row["arrivals"] for row in rows]
        for axes, (key, title) in zip(panels, titles.items(), strict=True):
            for name, way in WAYS.items():
                style = "o--" if way.padded else "o-"
                axes.plot(counts, [row[name][key] for row in rows], style, color=way.colour, label=name)
            axes.set_title(f"TTFT {title}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set(xlabel="prompts that arrive together", ylim=(0, None))
        panels[0].set_ylabel("seconds")
        panels[0].legend(loc="upper left")
        highest = max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(0, highest)
