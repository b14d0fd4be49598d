"""Starve it: the same requests with the KV pool at 100, 50, 25 and 10 % of what they need.

Every policy, every pool. A pool that is too small costs time: requests wait, are preempted, and
recompute what they forgot. It must cost nothing else: all complete, and every answer is the one of
the unstarved run, bit for bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import bare, chart, options
from bench.exactness import Recorder, Trail
from bench.lengths import HeavyTail
from bench.report import Advance, Report
from bench.stopwatch import wait
from bench.workload import Shape, Workload, build
from engine_actor.records import StepRecord
from model.batch import Batch
from model.executor import Sampled
from model.transformer import Transformer
from policies import POLICIES, load_policy

POOLS = (1.0, 0.5, 0.25, 0.1)
SLOTS = 24
MAX_LEN = 128
QUEUE_POINTS = 200
REPEATS = 5


def crowd(requests: int, vocab: int) -> Workload:
    """All at once, two tenants, some of them urgent. None needs a tenth of what all need together."""
    tenants, priorities = {"a": 0.5, "b": 0.5}, {0: 0.25, 1: 0.75}
    prompts, outputs = HeavyTail(30, 0.3, 24, 40, tail=0.05), HeavyTail(14, 0.6, 6, 40)
    shape = Shape(requests, prompts, outputs, tenants=tenants, priorities=priorities)
    return build(shape, "starve", vocab=vocab)


def drive(
    model: Transformer, workload: Workload, policy: str, kv_budget: int | None, advance: Advance
) -> tuple[bare.Run, Trail]:
    """The workload through a fresh engine, and the bits of every logits row on the way."""
    recorder = Recorder(model)
    storage = model.new_storage(SLOTS, MAX_LEN)
    engine = recorder.engine(storage, load_policy(policy), kv_budget)
    run = bare.drive(engine, workload, advance=advance)
    outputs = ((t.item.id, index, token) for t in run.requests for index, token in enumerate(t.output))
    return run, Trail(recorder.digests, {(name, index): Sampled(token) for name, index, token in outputs})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--requests", type=int, default=24, help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    report = Report("starve", args.out)
    model = bare.load(args.model)
    work = crowd(args.requests, model.vocab_size)
    report.say(str(work))
    report.note(
        "What to see: the smaller the pool, the longer the queue and the more is computed twice; yet all "
        "complete, and no bit of any answer differs."
    )
    with report.progress("starve", work.output_tokens * (1 + len(POLICIES) * len(POOLS))) as advance:
        free, answers = drive(model, work, "fcfs", None, advance)
        need = peak_kv(free.records)
        largest = max(len(item.prompt) + item.output_tokens for item in work.items)
        cost = recompute_cost(model)
        runs: list[dict[str, Any]] = []
        data = {"runs": runs, "need_kv_tokens": need, "recompute": cost}
        for policy, pool in ((policy, pool) for policy in POLICIES for pool in POOLS):
            budget = max(round(pool * need), largest)
            played, trail = drive(model, work, policy, budget, advance)
            told = {"policy": policy, "pool": pool, "kv_tokens": budget}
            told |= {"different": len(answers.differs_at(trail))}
            runs.append(told | _figures(played, cost["seconds_per_token"]))
            report.save(data)
    report.records(
        f"The pool they need: {need:,} KV tokens. Preempted: times per request; times in s",
        runs,
        "policy | pool | tokens: kv_tokens | done: completed | of: total | "
        "preempted: preemptions_per_request | recomputed: recomputed_tokens | "
        "of the time: recompute_share | tokens/s: tokens_per_s | TTFT p50: ttft_p50 | p95: ttft_p95 | "
        "E2E p95: e2e_p95 | different",
    )
    report.note(
        f"A forgotten token costs {1e3 * cost['seconds_per_token']:.2f} ms to compute again. Its KV is "
        f"{cost['kv_bytes_per_token'] / 1024:.0f} KiB, which this machine's memory copies out and back in "
        f'{1e3 * cost["copy_seconds_per_token"]:.3f} ms. "Of the time": recomputing, the most that a free '
        "swap could save."
    )
    _draw(report, runs)
    report.at_least("completed, of all runs", min(r["completed"] / r["total"] for r in runs), 1)
    report.at_most("positions that differ from the unstarved run", sum(r["different"] for r in runs), 0)
    starved = [r["preemptions_per_request"] for r in runs if r["pool"] == min(POOLS)]
    report.at_least("preemptions per request in the smallest pool", min(starved), 0.1)
    return report.finish(data)


def recompute_cost(model: Transformer, tokens: int = MAX_LEN) -> dict[str, float]:
    """What a forgotten token costs: to compute again, or to copy out of the pool and back.

    The copy is within this machine's memory: the least a swap could cost.
    """
    storage = model.new_storage(1, tokens)
    slot = [part[:, 0] for part in (storage.keys, storage.values)]
    away = [torch.empty_like(part) for part in slot]
    positions = np.arange(tokens, dtype=np.int64)
    batch = Batch(positions, positions, np.zeros_like(positions), np.array([tokens - 1]))

    def copy() -> None:
        for part, kept in zip(slot, away, strict=True):
            kept.copy_(part)
            part.copy_(kept)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            work()
            wait(model)
            times.append(time.perf_counter() - started)
        return median(times)

    return {
        "seconds_per_token": seconds(lambda: model.forward(batch, storage)) / tokens,
        "copy_seconds_per_token": seconds(copy) / tokens,
        "kv_bytes_per_token": sum(part.numel() * part.element_size() for part in slot) / tokens,
    }


def peak_kv(records: Sequence[StepRecord]) -> int:
    """Most KV tokens held at once, those of requests that had no rows in that step included."""
    held: dict[str, int] = {}
    peak = 0
    for record in records:
        held |= {share.request_id: share.start + share.tokens for share in record.shares}
        peak = max(peak, sum(held.values()))
        for name in (*record.finished, *record.preempted):
            held.pop(name, None)
    return peak


def _figures(run: bare.Run, seconds_per_token: float) -> dict[str, Any]:
    summary = run.summary()
    recomputed = sum(t.recomputed_tokens for t in run.requests)
    thinned = run.records[:: max(1, len(run.records) // QUEUE_POINTS)]
    return {
        "total": len(run.requests),
        "preemptions_per_request": summary["preemptions"] / len(run.requests),
        "recomputed_tokens": recomputed,
        "recompute_share": recomputed * seconds_per_token / run.seconds,
        **summary,
        "queue": [[record.started - run.started, record.waiting] for record in thinned],
    }


def _draw(report: Report, runs: list[dict[str, Any]]) -> None:
    def by_policy(key: str) -> dict[str, list[float]]:
        return {policy: [r[key] for r in runs if r["policy"] == policy] for policy in POLICIES}

    pools = [f"{pool:.0%}" for pool in POOLS]
    with report.chart(rows=2, columns=2, size=(13, 9)) as (figure, ((speed, again), (first, queue))):
        chart.columns(speed, pools, by_policy("tokens_per_s"))
        speed.set(title="Throughput", ylabel="output tokens/s")
        chart.columns(again, pools, by_policy("preemptions_per_request"))
        again.set(title="Preemptions", ylabel="per request")
        chart.columns(first, pools, by_policy("ttft_p50"), up_to=by_policy("ttft_p95"))
        first.set(title="Time to first token: p50, line to p95", ylabel="seconds from arrival")
        for axes in (speed, again, first):
            axes.set_xlabel("KV pool, of what the requests need")
        for r in (r for r in runs if r["policy"] == "fcfs"):
            queue.step(*np.array(r["queue"]).T, where="post", label=f"pool {r['pool']:.0%}")
        queue.set(title="Queue under fcfs", ylabel="requests waiting", xlabel="seconds")
        queue.legend()
        figure.legend(*speed.get_legend_handles_labels(), loc="outside upper center", ncols=len(POLICIES))
