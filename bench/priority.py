"""An urgent request into a full engine: with displacement it does not wait for anyone to finish.

Background requests of low priority hold every slot and more of them wait. Urgent ones arrive at
random moments. The bar: 95 % of them have their first token within three steps and their own prefill.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import bare, chart, options
from bench.chart import MUTED
from bench.lengths import HeavyTail, fixed
from bench.report import Advance, Report
from bench.samples import percentiles
from bench.timeline import latencies
from bench.workload import Shape, Workload, arrivals, build
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from model.transformer import Transformer
from policies.base import Policy, Schedulable
from policies.priority import Priority

SLOTS = 8
MAX_LEN = 256
STEP_TOKENS = 24
"""Room for an urgent prompt in one step beside the decodes; no more, so that steps stay short while those
who were displaced recompute."""
STEPS = 3
EVERY = 24
"""Plain steps between urgent requests; so long, too, until the slots are full and the first one comes."""
BACKGROUND = 3
"""Requests in the background for each urgent one: enough that some still wait when the last one arrives."""
REPEATS = 7


class PoliteEntry(Priority):
    """Urgent requests are next, but wait until a slot is free: what displacement is compared to."""

    name = "priority, no displacement"

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Sequence[Schedulable]:
        return ()


POLICIES: tuple[type[Policy], ...] = (Priority, PoliteEntry)


def crowd(urgent: int, every: float, vocab: int) -> Workload:
    """`urgent` short requests, one in `every` seconds on average, into a backlog that outlasts them."""
    background = build(
        Shape(
            BACKGROUND * urgent, HeavyTail(32, 0.3, 16, 64), HeavyTail(80, 0.3, 48, 160), priorities={9: 1}
        ),
        vocab=vocab,
    )
    rushed = build(Shape(urgent, fixed(16), fixed(4)), seed=1, vocab=vocab)
    times = 2.5 * every + arrivals(urgent, 1 / every, burstiness=0.5, seed=2)
    items = [
        replace(item, id=f"urgent{index}", arrival=float(time))
        for index, (item, time) in enumerate(zip(rushed.items, times, strict=True))
    ]
    return Workload("priority", tuple(sorted([*background.items, *items], key=lambda item: item.arrival)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--urgent", type=int, default=24, help="urgent requests (default: %(default)s)")
    every = f"seconds between them (default: what {EVERY} steps of a full engine take)"
    parser.add_argument("--every", type=float, help=every)


def run(args: argparse.Namespace) -> int:
    report = Report("priority", args.out)
    model = bare.load(args.model)
    vocab = model.vocab_size
    full = bare.drive(_engine(model, Priority()), build(Shape(SLOTS, fixed(32), fixed(48)), vocab=vocab))
    every = args.every or EVERY * statistics.median(record.seconds for record in full.records)
    work = crowd(args.urgent, every, vocab)
    report.say(
        f"{args.urgent} urgent requests into {SLOTS} slots that {BACKGROUND * args.urgent} others keep full"
    )
    report.note(
        "What to see: with displacement an urgent request has its first token within a few steps; without, "
        "after somebody has finished."
    )
    urgent = next(item for item in work.items if item.id == "urgent0")
    alone = Workload("alone", (replace(urgent, arrival=0.0, output_tokens=1),))
    runs = (bare.drive(_engine(model, Priority()), alone) for _ in range(REPEATS))
    own_prefill = statistics.median(run.requests[0].ttft for run in runs)
    figures: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        with report.progress(policy.name, args.urgent) as advance:
            figures[policy.name] = _measure(model, work, policy(), advance)
    ours = figures[Priority.name]
    report.records(
        "Urgent requests, and those whose slots they take; seconds",
        [{"policy": name, **r} for name, r in figures.items()],
        "policy | urgent TTFT p50: urgent.ttft_p50 | p95: urgent.ttft_p95 | in steps: urgent_steps.p95 | "
        "others' ITL p50: others.itl_p50 | p95: others.itl_p95 | displaced | tokens/s: tokens_per_s",
    )
    bound = STEPS * ours["step"]["p50"] + own_prefill
    with report.chart(size=(11, 4.6)) as (_, axes):
        marks = {name: {p: r["urgent"][f"ttft_{p}"] for p in ("p50", "p95")} for name, r in figures.items()}
        chart.dots(axes, {name: r["urgent"]["ttft"] for name, r in figures.items()}, marks)
        axes.axvline(bound, color=MUTED, linestyle="--", linewidth=1.2)
        bar = f" bar: {STEPS} steps + own prefill"
        axes.annotate(bar, (bound, len(figures) - 0.55), fontsize=10, va="bottom")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("urgent requests' time to first token, seconds from arrival")
        axes.set_title("Urgent requests into a full engine")
    what = f"urgent TTFT p95, against {STEPS} steps + its own prefill"
    report.at_most(what, ours["urgent"]["ttft_p95"], bound, " s")
    waiting = min(r["waiting_at_last_urgent"] for r in figures.values())
    what = "background requests waiting when the last urgent one arrives, fewest of all runs"
    report.at_least(what, waiting, 1)
    data = {"urgent_ttft_p95": ours["urgent"]["ttft_p95"], "step_median": ours["step"]["p50"]}
    data |= {"own_prefill": own_prefill, "urgent_steps_p95": ours["urgent_steps"]["p95"]}
    return report.finish(data | {"policies": figures})


def _engine(model: Transformer, policy: Policy) -> Engine:
    return bare.build(model, slots=SLOTS, max_len=MAX_LEN, policy=policy, max_step_tokens=STEP_TOKENS)


def _measure(model: Transformer, work: Workload, policy: Policy, advance: Advance) -> dict[str, Any]:
    """Until the last urgent request is done; "step" is of those while all slots were taken."""
    engine = _engine(model, policy)
    left = {item.id for item in work.items if item.priority == 0}

    def on_step(record: StepRecord) -> None:
        for name in left.intersection(record.finished):
            left.remove(name)
            advance()
        for name in () if left else list(engine.requests):
            engine.abort(name)

    run = bare.drive(engine, work, on_step=on_step)
    urgent = [t for t in run.requests if t.item.priority == 0]
    others = [t for t in run.requests if t.item.priority]
    last = max(t.arrival for t in urgent)
    steps = [
        sum(t.arrival < r.started + r.seconds and r.started < t.token_times[0] for r in run.records)
        for t in urgent
    ]
    return {
        "urgent_steps": percentiles(steps),
        "waiting_at_last_urgent": sum(t.admitted is None or t.admitted > last for t in others),
        "urgent": latencies(urgent, run.seconds) | {"ttft": [t.ttft for t in urgent]},
        "others": latencies([t for t in others if t.token_times], run.seconds),
        "displaced": sum(len(record.preempted) for record in run.records),
        "tokens_per_s": run.tokens_per_s,
        "step": percentiles([record.seconds for record in run.records if not record.free_slots]),
    }
