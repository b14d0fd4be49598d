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

import numpy as np

from bench import bare
from bench.report import CONTINUOUS, STATIC, Advance, Report, percentiles
from bench.timeline import latencies
from bench.workload import HeavyTail, Item, Shape, Workload, arrivals, build
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from model.transformer import Transformer
from policies.base import Policy, Schedulable
from policies.fcfs import Fcfs
from policies.priority import Priority

SLOTS = 8
MAX_LEN = 256
STEP_TOKENS = 24
"""Room for an urgent prompt in one step beside the decodes; no more, so that steps stay short while those
who were displaced recompute."""
STEPS = 3
FIRST_URGENT = 2.0
"""Seconds until every slot is taken."""
BACKGROUND = 3
"""Requests in the background for each urgent one: enough that some still wait when the last one arrives."""


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
    rushed = build(Shape(urgent, HeavyTail(16, 0.1, 16, 16), HeavyTail(4, 0.1, 4, 4)), seed=1, vocab=vocab)
    times = FIRST_URGENT + arrivals(urgent, 1 / every, burstiness=0.5, seed=2)
    items = [
        replace(item, id=f"urgent{index}", arrival=float(time))
        for index, (item, time) in enumerate(zip(rushed.items, times, strict=True))
    ]
    return Workload("priority", tuple(sorted([*background.items, *items], key=lambda item: item.arrival)))


def prefill_alone(model: Transformer, item: Item, repeats: int = 7) -> float:
    """Median seconds to the first token of `item` in an empty engine."""
    alone = Workload("alone", (replace(item, arrival=0.0, output_tokens=1),))
    runs = (bare.drive(_engine(model, Fcfs()), alone) for _ in range(repeats))
    return statistics.median(run.requests[0].ttft for run in runs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--urgent", type=int, default=24, help="urgent requests (default: %(default)s)")
    parser.add_argument(
        "--every", type=float, default=0.8, help="seconds between them (default: %(default)s)"
    )
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory (default: packaged)")


def run(args: argparse.Namespace) -> int:
    report = Report("priority", args.out)
    model = bare.load(args.model)
    bare.warm_up(model)
    work = crowd(args.urgent, args.every, model.vocab_size)
    report.say(
        f"{args.urgent} urgent requests into {SLOTS} slots that {BACKGROUND * args.urgent} others keep full"
    )
    report.note(
        "What to see: with displacement an urgent request has its first token within a few steps; without, "
        "after somebody has finished."
    )
    sample = next(item for item in work.items if item.id == "urgent0")
    own_prefill = prefill_alone(model, sample)
    runs: dict[str, dict[str, Any]] = {}
    steps: dict[str, float] = {}
    for policy in POLICIES:
        with report.progress(policy.name, args.urgent) as advance:
            runs[policy.name], steps[policy.name] = _measure(model, work, policy(), advance)
    ours = runs[Priority.name]
    data = {
        "urgent_ttft_p95": ours["urgent"]["ttft_p95"],
        "step_median": steps[Priority.name],
        "own_prefill": own_prefill,
        "urgent_steps_p95": ours["urgent_steps"]["p95"],
        "policies": runs,
    }
    report.table(
        "Seconds",
        [
            "policy",
            "urgent TTFT p50",
            "p95",
            "in steps, p95",
            "others' ITL p50",
            "p95",
            "displaced",
            "tokens/s",
        ],
        [
            [
                name,
                *(r["urgent"][f"ttft_{key}"] for key in ("p50", "p95")),
                r["urgent_steps"]["p95"],
                *(r["others"][f"itl_{key}"] for key in ("p50", "p95")),
                r["displaced"],
                r["tokens_per_s"],
            ]
            for name, r in runs.items()
        ],
    )
    bound = STEPS * data["step_median"] + own_prefill
    _draw(report, runs, bound)
    report.at_most(
        f"urgent TTFT p95, against {STEPS} steps + its own prefill", data["urgent_ttft_p95"], bound, " s"
    )
    report.at_least(
        "background requests waiting when the last urgent one arrives, fewest of all runs",
        min(r["waiting_at_last_urgent"] for r in runs.values()),
        1,
    )
    return report.finish(data)


def _engine(model: Transformer, policy: Policy) -> Engine:
    return bare.build(model, slots=SLOTS, max_len=MAX_LEN, policy=policy, max_step_tokens=STEP_TOKENS)


def _measure(
    model: Transformer, work: Workload, policy: Policy, advance: Advance
) -> tuple[dict[str, Any], float]:
    """Until the last urgent request is done; and the median step while all slots were taken."""
    engine = _engine(model, policy)
    rushed = {item.id for item in work.items if item.priority == 0}
    left = set(rushed)

    def on_step(record: StepRecord) -> None:
        for name in left.intersection(record.finished):
            left.remove(name)
            advance()
        if not left:
            for name in list(engine.requests):
                engine.abort(name)

    run = bare.drive(engine, work, on_step=on_step)
    displaced = sum(len(record.preempted) for record in run.records)
    urgent, others = (
        [t for t in run.requests if (t.item.id in rushed) == wanted and t.token_times]
        for wanted in (True, False)
    )
    full = [record.seconds for record in run.records if not record.free_slots]
    steps = [
        sum(
            t.arrival < record.started + record.seconds and record.started < t.token_times[0]
            for record in run.records
        )
        for t in urgent
    ]
    last = max(t.arrival for t in urgent)
    background = (t for t in run.requests if t.item.id not in rushed)
    figures = {
        "urgent_steps": percentiles(steps),
        "waiting_at_last_urgent": sum(t.admitted is None or t.admitted > last for t in background),
        "urgent": latencies(urgent, run.seconds) | {"ttft": [t.ttft for t in urgent]},
        "others": latencies(others, run.seconds),
        "displaced": displaced,
        "tokens_per_s": run.tokens_per_s,
        "step": percentiles(full),
    }
    return figures, statistics.median(full)


def _draw(report: Report, runs: dict[str, dict[str, Any]], bound: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    colors = (CONTINUOUS, STATIC)
    with report.chart(size=(11, 4.6)) as (_, axes):
        for row, (color, r) in enumerate(zip(colors, runs.values(), strict=True)):
            urgent = r["urgent"]
            spread = row + np.linspace(-0.18, 0.18, len(urgent["ttft"]))
            axes.scatter(urgent["ttft"], spread, s=26, color=color, alpha=0.55, linewidths=0)
            for key in ("p50", "p95"):
                value = urgent[f"ttft_{key}"]
                axes.plot([value, value], [row - 0.28, row + 0.28], color=color)
                axes.annotate(
                    key, (value, row - 0.31), ha="right" if key == "p50" else "left", fontsize=10, color=color
                )
        axes.axvline(bound, color="#6B7480", linestyle="--", linewidth=1.2)
        axes.annotate(
            f" bar: {STEPS} steps + own prefill", (bound, len(runs) - 0.55), fontsize=10, va="bottom"
        )
        axes.set_yticks(range(len(runs)), list(runs))
        axes.set_ylim(len(runs) - 0.45, -0.55)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("urgent requests' time to first token, seconds from arrival")
        axes.set_title("Urgent requests into a full engine")
