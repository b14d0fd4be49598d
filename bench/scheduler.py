"""What deciding costs: microseconds for one plan, by policy, running and waiting requests.

A real engine with an executor that computes nothing, at a steady load: whoever finishes is replaced by a
new arrival, from 64 tenants and with five priorities. A plan has to vanish beside a step of
tens of milliseconds, and to stay small when the queue does not.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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


@dataclass
class Crowd:
    """Endless requests, the same for every policy."""

    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def request(self) -> Request:
        number = next(self.numbers)
        length = int(np.clip(self.random.lognormal(3.4, 1.1), 4, 256))
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        tenant, priority = (int(draw) for draw in self.random.integers((64, 5)))
        return Request(f"r{number}", [1] * 8, params, tenant=f"t{tenant}", priority=priority, arrival=number)


def measure(name: str, running: int, waiting: int, steps: int) -> dict[str, Any]:
    """Percentiles of the seconds that `Scheduler.plan` takes with so many running and waiting."""
    engine = Engine(TimedExecutor(running, 512), load_policy(name), max_step_tokens=2 * running)
    crowd = Crowd()
    for _ in range(running + waiting):
        engine.submit(crowd.request())
    seconds = []
    for step in range(WARM_UP_STEPS + steps):
        _, record = engine.step()
        for _ in record.finished:
            engine.submit(crowd.request())
        if step >= WARM_UP_STEPS:
            seconds.append(sum(i.seconds for i in record.intervals if i.phase == "admit"))
    return percentiles(seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="plans timed per size (default: 300)")


def run(args: argparse.Namespace) -> int:
    report = Report("scheduler", args.out)
    report.note(
        "Expect: every policy far below the bar, and a queue of 100,000 costing about what one of 100 does."
    )
    figures: dict[str, dict[str, dict[str, float]]] = {"plan_us": {}, "plan_us_p95": {}}
    with report.progress("plans", len(POLICIES) * len(SIZES)) as advance:
        for name in POLICIES:
            for size in SIZES:
                cost = measure(name, *size, args.steps)
                key = _key(size)
                figures["plan_us"].setdefault(name, {})[key] = 1e6 * cost["p50"]
                figures["plan_us_p95"].setdefault(name, {})[key] = 1e6 * cost["p95"]
                advance()
    _table(report, figures)
    _draw(report, figures)
    for name, plans in figures["plan_us"].items():
        report.at_most(f"{name}: one plan at {_key(BAR_SIZE)}", plans[_key(BAR_SIZE)], BAR_US, " us")
        growth = plans[_key(LONGER_QUEUE)] / plans[_key(BAR_SIZE)]
        report.at_most(f"{name}: a queue ten times as long", growth, GROWTH, "x")
    return report.finish(figures)


def _key(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _table(report: Report, figures: dict[str, dict[str, dict[str, float]]]) -> None:
    rows = [
        [f"{running:,}", f"{waiting:,}", *(p50[_key((running, waiting))] for p50 in plans.values())]
        for plans in [figures["plan_us"]]
        for running, waiting in SIZES
    ]
    report.table("One plan, microseconds (p50)", ["running", "waiting", *figures["plan_us"]], rows)


def _draw(report: Report, figures: dict[str, dict[str, dict[str, float]]]) -> None:
    with report.chart() as (_, axes):
        places = np.arange(len(SIZES))
        width = 0.8 / len(POLICIES)
        for index, name in enumerate(POLICIES):
            p50, p95 = (
                np.array([figures[which][name][_key(size)] for size in SIZES])
                for which in ("plan_us", "plan_us_p95")
            )
            at = places + (index - (len(POLICIES) - 1) / 2) * width
            errors = [np.zeros(len(p50)), np.maximum(p95 - p50, 0)]
            axes.bar(at, p50, 0.9 * width, yerr=errors, label=name, error_kw={"lw": 1, "ecolor": "#6B7480"})
        axes.axhline(BAR_US, color="#6B7480", linestyle="--", linewidth=1.2)
        axes.annotate("bar at 256 running, 10,000 waiting", (-0.4, BAR_US), va="bottom", fontsize=10)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks(places, [f"{running}\n{waiting:,}" for running, waiting in SIZES])
        axes.set_xlabel("requests running (above) and waiting (below)")
        axes.set_ylabel("one plan, microseconds (p50, line to p95)")
        axes.set_title("Deciding who runs costs microseconds, however long the queue")
        axes.legend(ncols=len(POLICIES), loc="upper left", bbox_to_anchor=(0, 0.93))
