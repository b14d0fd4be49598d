"""Static against continuous batching: same engine, model, slots and workload, over real HTTP."""

from __future__ import annotations

import argparse
import heapq
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench import client, observed, options, variance, workload
from bench.chart import CONTINUOUS, INK, MUTED, STATIC
from bench.client import Endpoint
from bench.observed import Observed
from bench.report import BenchError, Report
from bench.samples import Pairs, mean_of
from bench.serving import served
from bench.timeline import COLUMNS
from bench.variance import SIDES
from bench.workload import Workload
from engine_actor.clock import wall

COLOURS = {"static": STATIC, "continuous": CONTINUOUS}
GAIN, UTILIZATION, TTFT_GAIN = 2.5, 0.9, 5.0
STATIC_TURNS = 3
"""A machine's speed drifts within minutes, so each static server runs between two continuous ones. One is
enough where both neighbours say the same of the bar; else there are so many at most."""
CLOSED = "all requests wait at the start"
LOAD = 0.7
"""Of continuous batching's own capacity: where the open-loop bar stands."""
OTHER_SEEDS = range(1, 9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    options.add_workload(parser)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0.35, LOAD],
        help="open loop: arrivals as shares of continuous batching's capacity (default: 0.35 0.7)",
    )
    parser.add_argument("--open-requests", type=int, default=40, help="requests per rate (default: 40)")
    parser.add_argument("--draws", type=int, default=3, help=f"workloads at {LOAD} (default: 3)")
    parser.add_argument(
        "--sweep", choices=["variance"], help="instead: the gain against the spread of output lengths"
    )


def run(args: argparse.Namespace) -> int:
    if args.sweep:
        return variance.run(args)
    report = Report("compare", args.out)
    closed = options.workload(args, max_len=args.max_len, requests=128).arriving(None)
    fewer = [vars(args) | {"requests": args.open_requests, "seed": args.seed + n} for n in range(args.draws)]
    opened = [options.workload(argparse.Namespace(**known), max_len=args.max_len) for known in fewer]
    report.say(f"closed loop: {closed}")
    static_steps, continuous_steps = fewest_steps(closed, args.slots)
    data: dict[str, Any] = {
        "workload": str(closed),
        "fewest_steps": {"static": static_steps, "continuous": continuous_steps},
        "closed": {},
        "open": {},
        "rates": [{"share": share} for share in args.rates],
    }
    pictures: dict[str, Observed] = {}
    turns: list[tuple[str, dict[str, Any]]] = []

    def visit(side: str) -> None:
        """A closed loop on a fresh server, and at the side's first turn the open ones."""
        report.say(f"{side}: starting `serve run` with {SIDES[side]}")
        limits = {"max_num_seqs": args.slots, "max_len": args.max_len}
        limits |= {"max_prompts": args.slots}  # those of the plug
        with served(SIDES[side] | limits | {"model": args.model}) as server:
            here = Endpoint(server.url)
            client.drive(here, workload.preset("smoke", seed=1))
            figures, pictures[side] = _measure(report, here, closed, f"{side}-closed", queued_at=args.slots)
            turns.append((side, figures))
            data["closed"][side] = mean_of([figures for name, figures in turns if name == side])
            for entry in data["rates"]:
                if side not in entry:
                    _open(report, here, side, entry, opened, data["closed"])
                    report.save(data)

    visit("continuous")
    for _ in range(STATIC_TURNS):
        visit("static")
        visit("continuous")
        rates = [figures["tokens_per_s"] for _, figures in turns]
        gains = [a / b if n % 2 == 0 else b / a for n, (a, b) in enumerate(pairwise(rates))]
        if min(gains) >= GAIN or max(gains) < GAIN:
            break
    data["open"] = next((entry for entry in data["rates"] if entry["share"] == LOAD), {})

    _tell(report, data)
    _draw(report, data)
    with report.chart("slots", rows=2, size=(12, 7.2)) as (_, axes):
        for panel, side in zip(axes, COLOURS, strict=True):
            pictures[side].draw(panel, COLOURS[side])
            spent, used = pictures[side].seconds, pictures[side].utilization() or 0.0
            panel.set_title(f"{side}: done after {spent:.0f} s, {used:.0%} of the slots' time at work")
            panel.set_xlim(0, max(seen.seconds for seen in pictures.values()))
        axes[-1].set_xlabel("seconds; dark: prefill, coloured: decode, grey: a slot that does nothing useful")
    in_order = ", ".join(f"{side} {figures['tokens_per_s']:.0f}" for side, figures in turns)
    report.note(f"Closed loop, tokens/s in order: {in_order}. A side counts as the mean of its turns.")
    report.note(_fewest(args, closed))
    static, continuous = data["closed"]["static"], data["closed"]["continuous"]
    gain = continuous["tokens_per_s"] / static["tokens_per_s"]
    report.at_least("closed loop: continuous / static tokens/s", gain, GAIN, "x")
    report.at_least(
        "closed loop: continuous batching's slot utilization while work waits",
        continuous["utilization_while_waiting"],
        UTILIZATION,
    )
    if data["open"]:
        what = f"open loop at {LOAD} of continuous batching's capacity: static / continuous TTFT p95"
        report.at_least(what, data["open"]["ttft_gain"], TTFT_GAIN, "x")
    return report.finish(data)


def _open(
    report: Report,
    here: Endpoint,
    side: str,
    entry: dict[str, Any],
    loads: Sequence[Workload],
    closed: Mapping[str, Any],
) -> None:
    """A side's open loops at one rate; with both sides known, what they say of each other."""
    rate = entry.setdefault("requests_per_s", entry["share"] * closed["continuous"]["requests_per_s"])
    draws = [
        _measure(report, here, load.arriving(rate, seed=n), f"{side}-{entry['share']:g}-{n}")[0]
        for n, load in enumerate(loads if entry["share"] == LOAD else loads[:1])
    ]
    entry[side] = mean_of(draws)
    entry.setdefault("ttft_p95_by_draw", {})[side] = [figures["ttft_p95"] for figures in draws]
    if side == "static":
        entry["of_static"] = rate / closed["static"]["requests_per_s"]
        p95 = entry["ttft_p95_by_draw"]
        entry["ttft_gain"] = Pairs.ratios(p95["static"], p95["continuous"]).median


def _measure(
    report: Report, here: Endpoint, load: Workload, name: str, *, queued_at: int | None = None
) -> tuple[dict[str, Any], Observed]:
    """A run's figures. `queued_at`: a closed loop, all requests wait for so many slots; else an open one."""
    with report.progress(name, load.output_tokens) as advance:
        run = client.drive(here, load, queued_at=queued_at, advance=advance)
    if run.errors:
        raise BenchError(f"{name}: {len(run.errors)} requests failed, the first with {run.errors[0]}")
    since = min(600.0, time.monotonic() - run.started + 1)
    trace = observed.fetch(here, since, report.out / f"{name}.trace.json")
    seen = observed.cut(trace, wall(run.started), wall(run.ended))
    return run.summary() | {
        "steps": len(seen.steps),
        "utilization": seen.utilization(),
        "utilization_while_waiting": seen.utilization_while_waiting(),
    }, seen


def fewest_steps(load: Workload, slots: int) -> tuple[int, int]:
    """Decode steps that a workload needs with full batches, and with slots that are refilled at once."""
    lengths = [item.output_tokens for item in load.items]
    batches = [lengths[first : first + slots] for first in range(0, len(lengths), slots)]
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return sum(map(max, batches)), max(free_at)


def _fewest(args: argparse.Namespace, load: Workload) -> str:
    """What the draw of the lengths alone decides, for this workload and for others like it."""
    static, continuous = fewest_steps(load, args.slots)
    told = (
        f"These lengths take {static:,} steps in static batches of {args.slots}, at least {continuous:,} in "
        f"slots that are refilled at once: {static / continuous:.2f}x."
    )
    if args.trace:
        return told
    others = (workload.preset(args.preset, seed=args.seed + s, requests=len(load)) for s in OTHER_SEEDS)
    ratios = [static / continuous for static, continuous in (fewest_steps(o, args.slots) for o in others)]
    return (
        f"{told} How much there is to gain lies in the draw: with the next {len(OTHER_SEEDS)} seeds it is "
        f"{min(ratios):.2f}x to {max(ratios):.2f}x."
    )


def at_rate(entry: Mapping[str, Any]) -> str:
    """A rate of arrivals beside what each side can serve."""
    return (
        f"{entry['share']:.0%} of the rate that continuous batching can serve "
        f"({entry['of_static']:.2g} times the rate that static batching can)"
    )


def _tell(report: Report, data: dict[str, Any]) -> None:
    def table(title: str, sides: Mapping[str, Any]) -> None:
        columns = f"side | {COLUMNS} | slots used: utilization | steps"
        report.records(title, [{"side": side, **sides[side]} for side in SIDES], columns)

    table(f"Closed loop: {CLOSED}", data["closed"])
    for entry in data["rates"]:
        table(f"Open loop: {entry['requests_per_s']:.2f} requests/s, {at_rate(entry)}", entry)
    for entry in data["rates"]:
        overload = " Static's queue grows for as long as they last." if entry["of_static"] > 1 else ""
        report.note(
            f"Open loop, arrivals at {at_rate(entry)}: static's TTFT p95 is {entry['ttft_gain']:.1f}x "
            f"continuous batching's (median of {len(entry['ttft_p95_by_draw']['static'])}).{overload}"
        )
    report.note(
        "What to see: a static batch keeps the slots of its finished requests until its longest answer "
        "is out; continuous batching gives each slot to the next in the queue at the very next step."
    )


def _draw(report: Report, data: dict[str, Any]) -> None:
    closed, opened = data["closed"], data["open"] or data["closed"]
    arrivals = textwrap.fill(f"arrivals at {at_rate(opened)}", 34) if data["open"] else CLOSED
    panels = [
        ("Output tokens/s", {s: closed[s]["tokens_per_s"] for s in COLOURS}, "{:.0f}", CLOSED),
        ("Slots at work", {s: 100 * closed[s]["utilization"] for s in COLOURS}, "{:.0f} %", CLOSED),
        ("TTFT p95", {s: opened[s]["ttft_p95"] for s in COLOURS}, "{:.1f} s", arrivals),
    ]
    with report.chart(columns=3, size=(11, 5)) as (figure, axes):
        for panel, (title, values, form, under) in zip(axes, panels, strict=True):
            bars = panel.bar(list(values), list(values.values()), color=list(COLOURS.values()), width=0.62)
            panel.bar_label(bars, [form.format(v) for v in values.values()], padding=4, fontsize=15)
            panel.set(title=title, xlabel=under, ylim=(0, 1.18 * max(values.values())), yticks=[])
            panel.spines["left"].set_visible(False)
            panel.grid(visible=False)
            panel.tick_params(axis="x", length=0, labelcolor=INK)
        figure.suptitle("Same engine, model, slots and requests. Only the batching differs.", color=MUTED)
