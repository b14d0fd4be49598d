"""What deciding costs: microseconds for one plan, by policy, running and waiting requests.

A real engine with an executor that computes nothing, at a steady load: whoever finishes is replaced by a
new arrival, from 64 tenants and with five priorities. A plan has to vanish beside a step of
tens of milliseconds, and to stay small when the queue does not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import chart
from bench.chart import MUTED
from bench.report import Report
from bench.samples import percentiles
from engine_actor.engine import Engine
from engine_actor.request import Request
from model.executor import SamplingParams
from model.timed_executor import TimedExecutor
from policies import POLICIES, load_policy

SIZES = [(16, 100), (16, 10_000), (64, 1_000), (256, 100), (256, 10_000), (256, 100_000)]
BAR_SIZE, BAR_US = (256, 10_000), 300.0
LONGER_QUEUE = (256, 100_000)
GROWTH = 2.0
"""A queue ten times as long may cost so much more. The logarithm grows 1.25 times; the rest is for
caches that no longer hold the queue."""
WARM_UP_STEPS = 50


def crowd() -> Iterator[Request]:
    """Endless requests, the same for every policy."""
    rng = np.random.default_rng(0)
    for number in itertools.count():
        length = int(np.clip(rng.lognormal(3.4, 1.1), 4, 256))
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        tenant, priority = (int(draw) for draw in rng.integers((64, 5)))
        yield Request(f"r{number}", [1] * 8, params, tenant=f"t{tenant}", priority=priority, arrival=number)


def measure(name: str, running: int, waiting: int, steps: int) -> dict[str, Any]:
    """Percentiles of the seconds that `Scheduler.plan` takes with so many running and waiting."""
    engine = Engine(TimedExecutor(running, 512), load_policy(name), max_step_tokens=2 * running)
    requests = crowd()
    for request in itertools.islice(requests, running + waiting):
        engine.submit(request)
    seconds = []
    for step in range(WARM_UP_STEPS + steps):
        _, record = engine.step()
        for request in itertools.islice(requests, len(record.finished)):
            engine.submit(request)
        if step >= WARM_UP_STEPS:
            seconds.append(record.phases["admit"])
    return percentiles(seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="plans timed per size (default: 300)")


def run(args: argparse.Namespace) -> int:
    report = Report("scheduler", args.out)
    report.note(
        "Expect: every policy far below the bar, and a queue of 100,000 costing about what one of 100 does."
    )
    plans: dict[str, dict[str, dict[str, float]]] = {"p50": {}, "p95": {}}
    with report.progress("plans", len(POLICIES) * len(SIZES)) as advance:
        for name in POLICIES:
            for size in SIZES:
                cost = measure(name, *size, args.steps)
                for p, figures in plans.items():
                    figures.setdefault(name, {})[_key(size)] = 1e6 * cost[p]
                advance()
    at = [(key, [figures[key] for figures in plans["p50"].values()]) for key in map(_key, SIZES)]
    report.table("One plan, microseconds (p50)", ["running x waiting", *POLICIES], [(k, *us) for k, us in at])
    with report.chart() as (_, axes):
        p50, p95 = ({name: [*of.values()] for name, of in plans[p].items()} for p in ("p50", "p95"))
        chart.columns(axes, [f"{running}\n{waiting:,}" for running, waiting in SIZES], p50, up_to=p95)
        axes.axhline(BAR_US, color=MUTED, linestyle="--", linewidth=1.2)
        axes.annotate("bar at 256 running, 10,000 waiting", (-0.4, BAR_US), va="bottom", fontsize=10)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("requests running (above) and waiting (below)")
        axes.set_ylabel("one plan, microseconds (p50, line to p95)")
        axes.set_title("Deciding who runs costs microseconds, however long the queue")
        axes.legend(ncols=len(POLICIES), loc="upper left", bbox_to_anchor=(0, 0.93))
    for name, cost_us in plans["p50"].items():
        report.at_most(f"{name}: one plan at {_key(BAR_SIZE)}", cost_us[_key(BAR_SIZE)], BAR_US, " us")
        growth = cost_us[_key(LONGER_QUEUE)] / cost_us[_key(BAR_SIZE)]
        report.at_most(f"{name}: a queue ten times as long", growth, GROWTH, "x")
    return report.finish({"plan_us": plans["p50"], "plan_us_p95": plans["p95"]})


def _key(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
