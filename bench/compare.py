"""Static against continuous batching: same engine, model, slots and workload, over real HTTP."""

from __future__ import annotations

import argparse
import heapq
import statistics
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench import bare, client, observed, workload
from bench.observed import Observed
from bench.report import CONTINUOUS, FAINT, INK, MUTED, STATIC, BenchError, Report
from bench.serving import served
from bench.timeline import Timelines
from bench.workload import Shape, Spread, Workload
from policies import load_policy

SIDES: dict[str, dict[str, Any]] = {
    "continuous": {"policy": "fcfs", "mode": "chunked"},
    # Fair to the old way: a batch takes all that waits, prefills it in one go, streams every token,
    # and makes room as soon as its last request is done.
    "static": {"policy": "static", "mode": "batched"},
}
COLOURS = {"continuous": CONTINUOUS, "static": STATIC}
GAIN, UTILIZATION, TTFT_GAIN = 2.5, 0.9, 5.0
TURNS = ("continuous", "static", "continuous")
"""Servers, one after another. The closed loop of the faster side runs before and after that of the other, and
counts as the mean of both, since a machine's speed drifts within minutes."""
CLOSED = "all requests wait at the start"
LOAD = 0.7
"""Of continuous batching's own capacity: where the open-loop bar stands."""
OTHER_SEEDS = range(1, 9)
VARIATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
SWEEP_ROUNDS = 3
"""Turns of each side per variation: a run takes seconds, so that one disturbance would decide it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bare.add_arguments(parser)
    workload.add_arguments(parser)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0.35, LOAD],
        help="open loop: arrivals as shares of continuous batching's capacity (default: 0.35 0.7)",
    )
    parser.add_argument("--open-requests", type=int, default=40, help="requests per rate (default: 40)")
    parser.add_argument(
        "--sweep", choices=["variance"], help="instead: the gain against the spread of output lengths"
    )


def run(args: argparse.Namespace) -> int:
    return _sweep(args) if args.sweep else _head_to_head(args)


def _head_to_head(args: argparse.Namespace) -> int:
    report = Report("compare", args.out)
    closed = workload.chosen(args, max_len=args.max_len, requests=128).arriving(None)
    fewer = argparse.Namespace(**vars(args) | {"requests": args.open_requests})
    opened = workload.chosen(fewer, max_len=args.max_len)
    report.say(f"closed loop: {closed}")

    data: dict[str, Any] = {
        "workload": str(closed),
        "fewest_steps": dict(zip(("static", "continuous"), fewest_steps(closed, args.slots), strict=True)),
        "closed": {},
        "open": {},
        "rates": [],
    }
    pictures: dict[str, Observed] = {}
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for side in TURNS:
        settings = {
            **SIDES[side],
            "max_num_seqs": args.slots,
            "max_len": args.max_len,
            "max_prompts": args.slots,  # those of the plug
            "model": args.model,
        }
        report.say(f"{side}: starting `serve run` with {SIDES[side]}")
        with _server(settings) as server:
            client.drive(server, workload.preset("smoke", seed=1))
            figures, pictures[side] = _measure(report, server, closed, f"{side}-closed", queued_at=args.slots)
            turns[side].append(figures)
            data["closed"][side] = _mean(turns[side])
            report.save(data)
            if len(turns[side]) > 1:
                continue
            capacity = turns["continuous"][0]["requests_per_s"]
            for index, share in enumerate(args.rates):
                load = opened.arriving(share * capacity, seed=args.seed)
                figures, _ = _measure(report, server, load, f"{side}-{share:g}")
                if index == len(data["rates"]):
                    data["rates"].append({"share": share, "requests_per_s": share * capacity})
                data["rates"][index][side] = figures
                if share == LOAD:
                    data["open"] = data["rates"][index]
                report.save(data)
    for entry in data["rates"]:
        entry["of_static"] = entry["requests_per_s"] / data["closed"]["static"]["requests_per_s"]
        entry["ttft_gain"] = entry["static"]["ttft_p95"] / entry["continuous"]["ttft_p95"]

    _tables(report, data)
    _draw_head_to_head(report, data)
    _draw_slots(report, pictures)
    by_turn = " and ".join(f"{turn['tokens_per_s']:.0f}" for turn in turns["continuous"])
    report.note(f"Closed loop, continuous: the mean of {by_turn} tokens/s, before and after static.")
    report.note(_fewest(args, closed))
    for entry in data["rates"]:
        overload = " Static's queue grows for as long as they last." if entry["of_static"] > 1 else ""
        report.note(
            f"Open loop, arrivals at {_capacity(entry)}: static's TTFT p95 is {entry['ttft_gain']:.1f}x "
            f"continuous batching's.{overload}"
        )
    report.note(
        "What to see: a static batch keeps the slots of its finished requests until its longest answer "
        "is out; continuous batching gives each slot to the next in the queue at the very next step."
    )
    static, continuous = data["closed"]["static"], data["closed"]["continuous"]
    gain = continuous["tokens_per_s"] / static["tokens_per_s"]
    report.at_least("closed loop: continuous / static tokens/s", gain, GAIN, "x")
    report.at_least(
        "closed loop: continuous batching's slot utilization while work waits",
        continuous["utilization_while_waiting"],
        UTILIZATION,
    )
    if data["open"]:
        report.at_least(
            f"open loop at {LOAD} of continuous batching's capacity: static / continuous TTFT p95",
            data["open"]["ttft_gain"],
            TTFT_GAIN,
            "x",
        )
    return report.finish(data)


@contextmanager
def _server(settings: Mapping[str, Any]) -> Iterator[client.Server]:
    """A server of our own, as the client sees it."""
    try:
        with served(settings) as server:
            yield client.Server(server.url)
    except RuntimeError as error:
        raise BenchError(str(error)) from error


def _measure(
    report: Report, server: client.Server, load: Workload, name: str, *, queued_at: int | None = None
) -> tuple[dict[str, Any], Observed]:
    """A run's figures. `queued_at`: a closed loop, all requests wait for so many slots; else an open one."""
    run: Timelines
    with report.progress(name, load.output_tokens) as advance:
        if queued_at is None:
            run = client.drive(server, load, advance=advance)
        else:
            run = client.drive_queue(server, load, slots=queued_at, advance=advance)
    if run.errors:
        raise BenchError(f"{name}: {len(run.errors)} requests failed, the first with {run.errors[0]}")
    since = min(600.0, time.time() - run.started + 1)
    seen = observed.fetch(
        server, run.started, run.ended, seconds=since, save=report.out / f"{name}.trace.json"
    )
    return run.summary() | {
        "steps": len(seen.steps),
        "utilization": seen.utilization(),
        "utilization_while_waiting": seen.utilization_while_waiting(),
    }, seen


def _fewest(args: argparse.Namespace, load: Workload) -> str:
    """What the draw of the lengths alone decides, for this workload and for others like it."""
    static, continuous = fewest_steps(load, args.slots)
    told = (
        f"These lengths take {static:,} steps in static batches of {args.slots}, at least {continuous:,} in "
        "slots that are refilled at once"
    )
    if args.trace:
        return f"{told}: {static / continuous:.2f}x."
    ratios = []
    for seed in OTHER_SEEDS:
        other = workload.preset(args.preset, seed=args.seed + seed, requests=len(load))
        fewest = fewest_steps(other, args.slots)
        ratios.append(fewest[0] / fewest[1])
    return (
        f"{told}: {static / continuous:.2f}x. How much there is to gain lies in the draw: with the next "
        f"{len(OTHER_SEEDS)} seeds it is {min(ratios):.2f}x to {max(ratios):.2f}x."
    )


def fewest_steps(load: Workload, slots: int) -> tuple[int, int]:
    """Decode steps that a workload needs with full batches, and with slots that are refilled at once."""
    lengths = [item.output_tokens for item in load.items]
    batches = [lengths[first : first + slots] for first in range(0, len(lengths), slots)]
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return sum(map(max, batches)), max(free_at)


def _mean(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the turns; None where a turn has none."""
    columns = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {name: None if None in values else statistics.mean(values) for name, values in columns.items()}


def _capacity(entry: Mapping[str, Any]) -> str:
    """A rate as a share of what each side can do at most."""
    return (
        f"{entry['share']:.0%} of continuous batching's capacity, "
        f"which is {entry['of_static']:.0%} of static batching's"
    )


def _tables(report: Report, data: dict[str, Any]) -> None:
    columns = {
        "tokens/s": "tokens_per_s",
        "requests/s": "requests_per_s",
        "TTFT p50 (s)": "ttft_p50",
        "p95": "ttft_p95",
        "p99": "ttft_p99",
        "ITL p50 (s)": "itl_p50",
        "ITL p95": "itl_p95",
        "E2E p50 (s)": "e2e_p50",
        "E2E p95": "e2e_p95",
        "slots used": "utilization",
        "steps": "steps",
    }

    def rows(sides: Mapping[str, Any]) -> list[list[object]]:
        return [[side, *(sides[side][key] for key in columns.values())] for side in SIDES if side in sides]

    report.table(f"Closed loop: {CLOSED}", ["", *columns], rows(data["closed"]))
    for entry in data["rates"]:
        title = f"Open loop: {entry['requests_per_s']:.2f} requests/s, {_capacity(entry)}"
        report.table(title, ["", *columns], rows(entry))


def _draw_head_to_head(report: Report, data: dict[str, Any]) -> None:
    closed, opened = data["closed"], data["open"] or data["closed"]
    arrivals = textwrap.fill(f"arrivals at {_capacity(opened)}", 34) if data["open"] else CLOSED
    panels = [
        ("Output tokens/s", {s: closed[s]["tokens_per_s"] for s in SIDES}, "{:.0f}", CLOSED),
        ("Slots at work", {s: 100 * closed[s]["utilization"] for s in SIDES}, "{:.0f} %", CLOSED),
        ("TTFT p95", {s: opened[s]["ttft_p95"] for s in SIDES}, "{:.1f} s", arrivals),
    ]
    with report.chart(columns=3, size=(11, 5)) as (figure, axes):
        for panel, (title, values, form, under) in zip(axes, panels, strict=True):
            order = ["static", "continuous"]
            bars = panel.bar(order, [values[s] for s in order], color=[COLOURS[s] for s in order], width=0.62)
            panel.bar_label(bars, [form.format(values[s]) for s in order], padding=4, fontsize=15, color=INK)
            panel.set_title(title)
            panel.set_xlabel(under)
            panel.set_ylim(0, 1.18 * max(values.values()))
            panel.set_yticks([])
            panel.spines["left"].set_visible(False)
            panel.grid(visible=False)
            panel.tick_params(axis="x", length=0, labelcolor=INK)
        figure.suptitle("Same engine, model, slots and requests. Only the batching differs.", color=MUTED)


def _draw_slots(report: Report, pictures: Mapping[str, Observed]) -> None:
    with report.chart("slots", rows=2, size=(12, 7.2)) as (_, axes):
        longest = 0.0
        for panel, side in zip(axes, ("static", "continuous"), strict=True):
            seen = pictures[side]
            start = seen.steps[0].started
            length = seen.steps[-1].started + seen.steps[-1].seconds - start
            longest = max(longest, length)
            panel.axvspan(0, length, color=FAINT, linewidth=0)
            for stay in seen.stays:
                colour = INK if stay.phase == "prefill" else COLOURS[side]
                panel.broken_barh(
                    [(stay.started - start, stay.seconds)], (stay.slot + 0.1, 0.8), color=colour
                )
            used = seen.utilization() or 0.0
            panel.set_title(f"{side}: done after {length:.0f} s, {used:.0%} of the slots' time at work")
            panel.set(ylabel="slot", ylim=(seen.slots, 0), yticks=[0.5, seen.slots - 0.5])
            panel.set_yticklabels(["0", str(seen.slots - 1)])
            panel.grid(visible=False)
        for panel in axes:
            panel.set_xlim(0, longest)
        axes[-1].set_xlabel("seconds; dark: prefill, coloured: decode, grey: a slot that does nothing useful")


def _sweep(args: argparse.Namespace) -> int:
    report = Report("compare-variance", args.out)
    model = bare.load(args.model)
    bare.warm_up(model)
    count, mean = args.requests or 48, 24
    rows: list[dict[str, float]] = []
    with report.progress("sweep", SWEEP_ROUNDS * 2 * count * mean * len(VARIATIONS)) as advance:
        for variation in VARIATIONS:
            shape = Shape(count, Spread(16, 0, 16), Spread(mean, variation, 24 * mean))
            load = workload.build(shape, f"variation {variation:g}", seed=args.seed, vocab=model.vocab_size)
            lengths = [item.output_tokens for item in load.items]
            row: dict[str, float] = {"variation": float(np.std(lengths) / np.mean(lengths))}
            runs: dict[str, list[bare.Run]] = {side: [] for side in SIDES}
            for number in range(SWEEP_ROUNDS):
                for side in list(SIDES)[:: 1 if number % 2 else -1]:
                    policy, mode = load_policy(SIDES[side]["policy"]), SIDES[side]["mode"]
                    engine = bare.build(
                        model, slots=args.slots, max_len=args.max_len, policy=policy, mode=mode
                    )
                    runs[side].append(bare.drive(engine, load, advance=advance))
            for side, turns in runs.items():
                row[f"{side}_tokens_per_s"] = statistics.median(run.tokens_per_s for run in turns)
                row[f"{side}_steps"] = len(turns[0].records)
            row["gain"] = row["continuous_tokens_per_s"] / row["static_tokens_per_s"]
            row["fewer_steps"] = row["static_steps"] / row["continuous_steps"]
            rows.append(row)
            report.save({"sweep": rows})
    report.table(
        f"{count} requests of {mean} output tokens on average, {args.slots} slots",
        ["std / mean of output lengths", "static tokens/s", "continuous tokens/s", "gain", "steps saved"],
        [
            [
                r["variation"],
                r["static_tokens_per_s"],
                r["continuous_tokens_per_s"],
                r["gain"],
                r["fewer_steps"],
            ]
            for r in rows
        ],
    )
    with report.chart() as (_, axes):
        variations = [r["variation"] for r in rows]
        axes.plot(variations, [r["gain"] for r in rows], "o-", color=CONTINUOUS, label="tokens/s, measured")
        axes.plot(variations, [r["fewer_steps"] for r in rows], "--", color=MUTED, label="steps saved")
        axes.axhline(1, color=STATIC, linewidth=1.5)
        axes.annotate("static batching", (variations[-1], 1), ha="right", va="bottom", color=STATIC)
        axes.set(ylim=(0, None), xlim=(0, None))
        axes.set_xlabel("spread of the output lengths: standard deviation / mean")
        axes.set_ylabel("continuous / static")
        axes.set_title("The gain is the variance: equal lengths leave nothing to win")
        axes.legend(loc="upper left")
    report.note(
        "What to see: where all answers are equally long a static batch wastes nothing; the more they "
        "differ, the longer its slots wait for the longest."
    )
    report.at_most("gain at no variance", rows[0]["gain"], 1.15, "x")
    report.at_least("gain at the largest variance / at none", rows[-1]["gain"] / rows[0]["gain"], 1.5, "x")
    return report.finish({"sweep": rows})
