"""Two tenants: A floods, B trickles, then B bursts while A still waits. First come first served, and fair.

Service is counted as the fair policy counts it: a prompt token 1, an output token 2. While both
tenants wait, their service may differ by 2 * max(longest prompt, 2 * KV tokens) at most
(Sheng et al., OSDI 2024). Fairness must not cost throughput: nothing is idle while anyone waits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench import bare, chart, options
from bench.lengths import HeavyTail
from bench.report import Report
from bench.samples import Pairs, in_turns
from bench.timeline import latencies
from bench.workload import Shape, Workload, build
from model.transformer import Transformer
from policies import load_policy

SLOTS = 8
MAX_LEN = 128
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
TRICKLES, BURST = 6, 6
TRICKLE_EVERY, BURST_AT = 0.06, 0.5
"""Of the time that A's flood alone would take."""
POLICIES = ("fcfs", "fair")
BAR_TTFT = 1 / 5
BAR_THROUGHPUT = 0.97
MOST_ROUNDS = 15
Turns = dict[str, list[bare.Run]]
Array = np.ndarray[Any, Any]


def crowd(flood: int, vocab: int, seconds: float) -> tuple[Workload, Workload]:
    """Both tenants, and B alone. `seconds`: what A's flood alone takes."""
    a = Shape(flood, HeavyTail(40, 0.3, 24, 64), HeavyTail(24, 0.5, 12, 48), tenants={"A": 1})
    b = Shape(TRICKLES + BURST, HeavyTail(24, 0.2, 16, 32), HeavyTail(12, 0.2, 8, 16), tenants={"B": 1})
    times = [(1 + i) * TRICKLE_EVERY * seconds for i in range(TRICKLES)] + [BURST_AT * seconds] * BURST
    due = zip(build(b, seed=1, vocab=vocab).items, times, strict=True)
    theirs = tuple(replace(item, id=f"b{n}", arrival=time) for n, (item, time) in enumerate(due))
    both = sorted((*build(a, vocab=vocab).items, *theirs), key=lambda item: item.arrival)
    return Workload("fair", tuple(both)), Workload("fair, B alone", theirs)


@dataclass
class Service:
    """Weighted service of both tenants, step by step."""

    seconds: Array
    """Since the start, when each step began."""
    served: dict[str, Array]
    stretches: list[Array]
    """The steps after which both tenants had requests in the queue, one array of numbers at a time."""

    @classmethod
    def of(cls, run: bare.Run) -> Service:
        """Without a shortage of KV nobody is preempted: who has been admitted waits no more."""
        began = np.array([record.started for record in run.records])
        served = {"A": np.zeros(len(began)), "B": np.zeros(len(began))}
        waiting = {tenant: np.zeros(len(began), bool) for tenant in served}
        for t in run.requests:
            admitted = t.admitted or 0.0
            waiting[t.item.tenant] |= (t.arrival <= began) & (began < admitted)
            served[t.item.tenant][np.searchsorted(began, admitted)] += PROMPT_WEIGHT * len(t.item.prompt)
        for step, record in enumerate(run.records):
            for share in record.shares:
                served[share.tenant][step] += OUTPUT_WEIGHT * share.sampled
        both = np.flatnonzero(waiting["A"] & waiting["B"])
        stretches = np.split(both, np.flatnonzero(np.diff(both) > 1) + 1) if len(both) else []
        return cls(began - run.started, {t: np.cumsum(steps) for t, steps in served.items()}, stretches)

    @property
    def gap(self) -> float:
        """How far the tenants drift apart while both wait."""
        difference = self.served["A"] - self.served["B"]
        return max((float(np.ptp(difference[steps])) for steps in self.stretches), default=0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--flood", type=int, default=64, help="requests of tenant A (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=6, help="fcfs and fair in turn, so often or more (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    report = Report("fair", args.out)
    model = bare.load(args.model)
    pace = _drive(model, crowd(4 * SLOTS, model.vocab_size, 0.0)[0], "fcfs")
    per_request = pace.seconds / len(pace.requests)
    both, alone = crowd(args.flood, model.vocab_size, args.flood * per_request)
    report.say(str(both))
    report.note(
        "What to see: under fcfs B waits behind A's whole flood; under fair it is next whenever a slot comes "
        "free, and while anyone waits the machine does as much work as before."
    )
    quiet = _drive(model, alone, "fcfs")
    sides = {policy: partial(_drive, model, both, policy) for policy in POLICIES}

    def ratio(turns: dict[str, list[bare.Run]]) -> Pairs:
        fcfs, fair = ([r.tokens_per_s_while_waiting for r in turns[policy]] for policy in POLICIES)
        return Pairs.ratios(fair, fcfs)

    turns = in_turns(
        sides, args.rounds, at_most=MOST_ROUNDS, settled=lambda t: ratio(t).clear_of(BAR_THROUGHPUT)
    )
    data = _figures(both, quiet, turns, ratio(turns))
    shown = {
        "B: TTFT p50 (s)": "b_ttft_p50",
        "p95": "b_ttft_p95",
        "A: E2E p95": "a_e2e_p95",
        "service gap": "service_gap",
        "tokens/s while requests wait": "tokens_per_s_while_waiting",
        "of all": "tokens_per_s",
        "steps at the end": "drain_steps",
    }
    title = f"Median of the rounds; the gap's bound is {data['gap_bound']:,.0f}"
    names = ("alone", *POLICIES)
    report.table(title, ["", *shown], [(n, *(data[key].get(n) for key in shown.values())) for n in names])
    report.note(
        f"Tokens/s, fair / fcfs, while requests wait: {ratio(turns)}. Over whole runs it is "
        f"{data['whole_run_ratio']:.3f}: fair leaves A's longer answers for the end, where slots come free "
        "and nobody is left to take them."
    )
    # The picture shows the round that the rest of the machine disturbed least.
    calm = min(range(len(turns["fair"])), key=lambda n: sum(turns[policy][n].seconds for policy in POLICIES))
    _draw(report, data, {policy: turns[policy][calm] for policy in POLICIES})
    ttft = data["b_ttft_p95"]
    report.at_most("B's TTFT p95, fair / fcfs", ttft["fair"] / ttft["fcfs"], BAR_TTFT)
    report.at_most("service gap while both wait, fair", data["max_service_gap"], data["gap_bound"])
    report.at_least(
        "tokens/s while requests wait, fair / fcfs (median of rounds)", ratio(turns).median, BAR_THROUGHPUT
    )
    waiting = "A's requests waiting when B's burst arrives, fewest of all runs"
    report.at_least(waiting, data["a_waiting_at_burst"], 1)
    return report.finish(data)


def _drive(model: Transformer, workload: Workload, policy: str) -> bare.Run:
    settings = {"prompt_weight": PROMPT_WEIGHT, "output_weight": OUTPUT_WEIGHT} if policy == "fair" else {}
    engine = bare.build(model, slots=SLOTS, max_len=MAX_LEN, policy=load_policy(policy, **settings))
    return bare.drive(engine, workload)


def _figures(both: Workload, quiet: bare.Run, turns: Turns, ratio: Pairs) -> dict[str, Any]:
    def median_of(figure: Callable[[bare.Run], float]) -> dict[str, float]:
        return {policy: median(map(figure, runs)) for policy, runs in turns.items()}

    def typical(tenant: str, key: str) -> dict[str, float]:
        return median_of(lambda r: latencies([t for t in r.requests if t.item.tenant == tenant], 1)[key])

    def waiting_at_burst(run: bare.Run) -> int:
        burst = run.started + max(item.arrival for item in both.items)
        return sum(t.item.tenant == "A" and (t.admitted or 0) > burst for t in run.requests)

    longest = max(len(item.prompt) for item in both.items)
    gaps = {policy: max(Service.of(run).gap for run in runs) for policy, runs in turns.items()}
    whole = Pairs.ratios(*([run.tokens_per_s for run in turns[policy]] for policy in ("fair", "fcfs")))
    alone = quiet.summary()
    return {
        "b_ttft_p95": {"alone": alone["ttft_p95"], **typical("B", "ttft_p95")},
        "b_ttft_p50": {"alone": alone["ttft_p50"], **typical("B", "ttft_p50")},
        "a_e2e_p95": typical("A", "e2e_p95"),
        "a_waiting_at_burst": min(waiting_at_burst(run) for runs in turns.values() for run in runs),
        "service_gap": gaps,
        "max_service_gap": gaps["fair"],
        "max_service_gap_fcfs": gaps["fcfs"],
        "gap_bound": 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * SLOTS * MAX_LEN),
        "tokens_per_s": median_of(lambda run: run.tokens_per_s),
        "tokens_per_s_while_waiting": median_of(lambda run: run.tokens_per_s_while_waiting),
        "drain_steps": median_of(lambda run: len(run.records) - len(run.while_waiting)),
        "throughput_ratio": ratio.median,
        "throughput_ratios": ratio.values,
        "whole_run_ratio": whole.median,
    }


def _draw(report: Report, data: dict[str, Any], played: dict[str, bare.Run]) -> None:
    with report.chart(columns=3, size=(15, 5)) as (_, (*curves, bars)):
        services = {policy: Service.of(run) for policy, run in played.items()}
        for axes, (policy, service) in zip(curves, services.items(), strict=True):
            axes.plot(service.seconds, service.served["A"], label="A, floods")
            axes.plot(service.seconds, service.served["B"], label="B, trickles, then bursts")
            for number, steps in enumerate(service.stretches):
                label = "both wait" if number == 0 else None
                at = service.seconds[[steps[0], steps[-1]]]
                axes.axvspan(*at, color=chart.MUTED, alpha=0.15, lw=0, label=label)
            axes.set(title=f"Service under {policy}", xlabel="seconds", ylabel="weighted tokens served")
            axes.set_ylim(0, 1.05 * max(s.served["A"][-1] for s in services.values()))
            axes.legend(loc="upper left", fontsize=10)
        names = ("alone", *POLICIES)
        series = {p: [data[f"b_ttft_{p}"][name] for name in names] for p in ("p50", "p95")}
        chart.columns(bars, names, series, form="{:.2f} s")
        bars.set(title="B's time to first token", ylabel="seconds from arrival")
        bars.legend(fontsize=10)
