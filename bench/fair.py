"""Two tenants: A floods, B trickles, then B bursts while A still waits. First come first served, and fair.

Service is counted as the fair policy counts it: a prompt token 1, an output token 2. While both
tenants wait, their service may differ by 2 * max(longest prompt, 2 * KV tokens) at most
(Sheng et al., OSDI 2024). Fairness must not cost throughput: nothing is idle while anyone waits.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench import bare
from bench.report import CONTINUOUS, MUTED, STATIC, Advance, Report
from bench.timeline import latencies
from bench.workload import HeavyTail, Shape, Workload, build
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.request import Phase
from model.transformer import Transformer
from policies import load_policy

SLOTS = 8
MAX_LEN = 128
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
TRICKLE_EVERY, TRICKLES = 1.0, 6
BURST_AT, BURST = 9.0, 6
POLICIES = ("fcfs", "fair")
BAR_TTFT = 1 / 5
BAR_THROUGHPUT = 0.97


def crowd(flood: int, vocab: int) -> tuple[Workload, Workload]:
    """Both tenants, and B alone."""
    a = build(
        Shape(flood, HeavyTail(40, 0.3, 24, 64), HeavyTail(24, 0.5, 12, 48), tenants={"A": 1}), vocab=vocab
    )
    b = build(
        Shape(TRICKLES + BURST, HeavyTail(24, 0.2, 16, 32), HeavyTail(12, 0.2, 8, 16), tenants={"B": 1}),
        seed=1,
        vocab=vocab,
    )
    times = [(1 + i) * TRICKLE_EVERY for i in range(TRICKLES)] + [BURST_AT] * BURST
    theirs = tuple(
        replace(item, id=f"b{index}", arrival=time)
        for index, (item, time) in enumerate(zip(b.items, times, strict=True))
    )
    both = tuple(sorted((*a.items, *theirs), key=lambda item: item.arrival))
    return Workload("fair", both), Workload("fair, B alone", theirs)


@dataclass
class Ledger:
    """Weighted service of each tenant, step by step, and how far the two drift apart while both wait."""

    engine: Engine
    service: dict[str, float] = field(default_factory=lambda: {"A": 0.0, "B": 0.0})
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """(seconds of the engine's clock, service of A, service of B)"""
    both_waiting: list[tuple[float, float]] = field(default_factory=list)
    gap: float = 0.0
    _extremes: tuple[float, float] | None = None
    _prompts: dict[str, tuple[str, int]] = field(default_factory=dict)

    def note(self, record: StepRecord) -> None:
        for span in record.shares:
            self.service[span.tenant] += OUTPUT_WEIGHT * span.sampled
        for name in record.admitted:
            if name in self._prompts:  # else it was preempted, and its prompt has been counted
                tenant, tokens = self._prompts.pop(name)
                self.service[tenant] += PROMPT_WEIGHT * tokens
        self.history.append((record.started, self.service["A"], self.service["B"]))
        waiting = {r.tenant for r in self.engine.requests.values() if r.phase is Phase.WAITING}
        if {"A", "B"} <= waiting:
            difference = self.service["A"] - self.service["B"]
            low, high = self._extremes or (difference, difference)
            self._extremes = min(low, difference), max(high, difference)
            self.gap = max(self.gap, self._extremes[1] - self._extremes[0])
            if self.both_waiting and self.both_waiting[-1][1] == self.history[-2][0]:
                self.both_waiting[-1] = self.both_waiting[-1][0], record.started
            else:
                self.both_waiting.append((record.started, record.started))
        else:
            self._extremes = None

    def expect(self, workload: Workload) -> None:
        self._prompts = {item.id: (item.tenant, len(item.prompt)) for item in workload.items}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flood", type=int, default=96, help="requests of tenant A (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="fcfs and fair in turn, so often (default: %(default)s)"
    )
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory (default: packaged)")


def run(args: argparse.Namespace) -> int:
    report = Report("fair", args.out)
    model = bare.load(args.model)
    bare.warm_up(model)
    both, alone = crowd(args.flood, model.vocab_size)
    report.say(str(both))
    report.note(
        "What to see: under fcfs B waits behind A's whole flood; under fair it is next whenever a slot comes "
        "free, and the machine does as much work as before."
    )
    with report.progress("B alone", alone.output_tokens) as advance:
        quiet, _ = _drive(model, alone, "fcfs", advance)
    rounds: list[dict[str, tuple[bare.Run, Ledger]]] = []
    data: dict[str, Any] = {}
    for number in range(1, args.rounds + 1):
        # The machine's pace drifts; taking turns lets it drift for both alike.
        rounds.append({})
        for policy in POLICIES if number % 2 else reversed(POLICIES):
            with report.progress(f"{policy} {number}/{args.rounds}", both.output_tokens) as advance:
                rounds[-1][policy] = _drive(model, both, policy, advance)
        data = _figures(both, quiet, rounds)
        report.save(data)
    _table(report, data)
    # The picture shows the round that the rest of the machine disturbed least.
    _draw(report, data, min(rounds, key=lambda played: sum(run.seconds for run, _ in played.values())))
    ttft = data["b_ttft_p95"]
    report.at_most("B's TTFT p95, fair / fcfs", ttft["fair"] / ttft["fcfs"], BAR_TTFT)
    report.at_most("service gap while both wait, fair", data["max_service_gap"], data["gap_bound"])
    report.at_least("tokens/s, fair / fcfs (median of rounds)", data["throughput_ratio"], BAR_THROUGHPUT)
    report.at_least(
        "A's requests waiting when B's burst arrives, fewest of all runs", data["a_waiting_at_burst"], 1
    )
    return report.finish(data)


def _drive(model: Transformer, workload: Workload, policy: str, advance: Advance) -> tuple[bare.Run, Ledger]:
    settings = {"prompt_weight": PROMPT_WEIGHT, "output_weight": OUTPUT_WEIGHT} if policy == "fair" else {}
    engine = bare.build(model, slots=SLOTS, max_len=MAX_LEN, policy=load_policy(policy, **settings))
    ledger = Ledger(engine)
    ledger.expect(workload)
    return bare.drive(engine, workload, advance=advance, on_step=ledger.note), ledger


def _figures(
    both: Workload, quiet: bare.Run, rounds: list[dict[str, tuple[bare.Run, Ledger]]]
) -> dict[str, Any]:
    def over_rounds(policy: str, tenant: str, key: str) -> float:
        values: list[float] = []
        for played in rounds:
            run, _ = played[policy]
            own = [t for t in run.requests if t.item.tenant == tenant]
            values.append(latencies(own, run.seconds)[key])
        return statistics.median(values)

    longest = max(len(item.prompt) for item in both.items)
    return {
        "b_ttft_p95": {
            "alone": quiet.summary()["ttft_p95"],
            **{policy: over_rounds(policy, "B", "ttft_p95") for policy in POLICIES},
        },
        "b_ttft_p50": {
            "alone": quiet.summary()["ttft_p50"],
            **{policy: over_rounds(policy, "B", "ttft_p50") for policy in POLICIES},
        },
        "a_e2e_p95": {policy: over_rounds(policy, "A", "e2e_p95") for policy in POLICIES},
        "a_waiting_at_burst": min(_waiting_at_burst(run) for played in rounds for run, _ in played.values()),
        "max_service_gap": max(played["fair"][1].gap for played in rounds),
        "max_service_gap_fcfs": max(played["fcfs"][1].gap for played in rounds),
        "gap_bound": 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * SLOTS * MAX_LEN),
        "tokens_per_s": {
            policy: statistics.median(played[policy][0].tokens_per_s for played in rounds)
            for policy in POLICIES
        },
        "throughput_ratio": statistics.median(
            played["fair"][0].tokens_per_s / played["fcfs"][0].tokens_per_s for played in rounds
        ),
    }


def _waiting_at_burst(run: bare.Run) -> int:
    burst = run.started + BURST_AT
    return sum(t.item.tenant == "A" and (t.admitted is None or t.admitted > burst) for t in run.requests)


def _table(report: Report, data: dict[str, Any]) -> None:
    gaps = {"fcfs": data["max_service_gap_fcfs"], "fair": data["max_service_gap"]}
    report.table(
        f"Median of the rounds; the gap's bound is {data['gap_bound']:,.0f}",
        ["", "B: TTFT p50 (s)", "B: TTFT p95 (s)", "A: E2E p95 (s)", "service gap", "tokens/s"],
        [
            [
                name,
                data["b_ttft_p50"][name],
                data["b_ttft_p95"][name],
                data["a_e2e_p95"].get(name),
                gaps.get(name),
                data["tokens_per_s"].get(name),
            ]
            for name in ("alone", *POLICIES)
        ],
    )


def _draw(report: Report, data: dict[str, Any], played: dict[str, tuple[bare.Run, Ledger]]) -> None:
    with report.chart(columns=3, size=(15, 5)) as (_, (*curves, bars)):
        for axes, policy in zip(curves, POLICIES, strict=True):
            run, ledger = played[policy]
            seconds, a, b = np.array(ledger.history).T
            seconds -= run.started
            axes.plot(seconds, a, color=CONTINUOUS, label="A, floods")
            axes.plot(seconds, b, color=STATIC, label="B, trickles, then bursts")
            for index, (start, end) in enumerate(ledger.both_waiting):
                label = "both wait" if index == 0 else None
                axes.axvspan(
                    start - run.started, end - run.started, color=MUTED, alpha=0.15, lw=0, label=label
                )
            axes.set_title(f"Service under {policy}")
            axes.set_xlabel("seconds")
            axes.set_ylabel("weighted tokens served")
            axes.legend(loc="upper left", fontsize=10)
        top = max(axes.get_ylim()[1] for axes in curves)
        for axes in curves:
            axes.set_ylim(0, top)
        names = ("alone", *POLICIES)
        p50 = np.array([data["b_ttft_p50"][name] for name in names])
        p95 = np.array([data["b_ttft_p95"][name] for name in names])
        places = np.arange(len(names))
        bars.bar(places - 0.2, p50, 0.38, color=STATIC, alpha=0.5, label="p50")
        drawn = bars.bar(places + 0.2, p95, 0.38, color=STATIC, label="p95")
        bars.bar_label(drawn, [f"{value:.2f} s" for value in p95], fontsize=10, padding=2)
        bars.set_xticks(places, names)
        bars.margins(y=0.12)
        bars.set_title("B's time to first token")
        bars.set_ylabel("seconds from arrival")
        bars.legend(fontsize=10)
