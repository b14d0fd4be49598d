"""Starve it: the same requests with the KV pool at 100, 50, 25 and 10 % of what they need.

Every policy, every pool. A pool that is too small costs time: requests wait, are preempted, and
recompute what they forgot. It must cost nothing else: all complete, and every answer is the one of
the unstarved run, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench import bare
from bench.chart import MUTED, PALETTE
from bench.exactness import Recorder, Trail
from bench.lengths import HeavyTail
from bench.report import Advance, Report
from bench.workload import Shape, Workload, build
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from model.batch import Batch
from model.executor import Sampled
from model.model_executor import ModelExecutor
from model.transformer import Transformer
from policies import POLICIES, load_policy

POOLS = (1.0, 0.5, 0.25, 0.1)
SLOTS = 24
MAX_LEN = 128
QUEUE_POINTS = 200


def crowd(requests: int, vocab: int) -> Workload:
    """All at once, two tenants, some of them urgent. None needs a tenth of what all need together."""
    return build(
        Shape(
            requests,
            HeavyTail(30, 0.3, 24, 40, tail=0.05),
            HeavyTail(14, 0.6, 6, 40),
            tenants={"a": 0.5, "b": 0.5},
            priorities={0: 0.25, 1: 0.75},
        ),
        "starve",
        vocab=vocab,
    )


def drive(
    model: Transformer, workload: Workload, policy: str, kv_budget: int | None, advance: Advance
) -> tuple[bare.Run, Trail]:
    """The workload through a fresh engine, and the bits of every logits row on the way."""
    recorder = Recorder(model)
    executor = ModelExecutor(recorder, model.new_storage(SLOTS, MAX_LEN))
    engine = Engine(executor, load_policy(policy), kv_budget=kv_budget)
    recorder.owners = lambda: {request.slot: request for request in engine.scheduler.running}
    run = bare.drive(engine, workload, advance=advance)
    tokens = {
        (t.item.id, index): Sampled(token) for t in run.requests for index, token in enumerate(t.output)
    }
    return run, Trail(recorder.digests, tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory (default: packaged)")


def run(args: argparse.Namespace) -> int:
    report = Report("starve", args.out)
    model = bare.load(args.model)
    work = crowd(args.requests, model.vocab_size)
    report.say(str(work))
    report.note(
        "What to see: the smaller the pool, the longer the queue and the more is computed twice; yet all "
        "complete, and no bit of any answer differs."
    )
    data: dict[str, Any] = {"runs": []}
    total = work.output_tokens * (1 + len(POLICIES) * len(POOLS))
    with report.progress("starve", total) as advance:
        free, answers = drive(model, work, "fcfs", None, advance)
        need = peak_kv(free.records)
        largest = max(len(item.prompt) + item.output_tokens for item in work.items)
        cost = recompute_cost(model)
        data |= {"need_kv_tokens": need, "recompute": cost}
        for policy in POLICIES:
            for pool in POOLS:
                budget = max(round(pool * need), largest)
                run, trail = drive(model, work, policy, budget, advance)
                different = len(answers.differs_at(trail))
                figures = _figures(policy, pool, budget, run, different, cost["seconds_per_token"])
                data["runs"].append(figures)
                report.save(data)
    runs = data["runs"]
    _table(report, data)
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
    kv = model.new_storage(1, tokens)
    slot_bytes = sum(part[:, 0].numel() * part.element_size() for part in (kv.keys, kv.values))
    positions = np.arange(tokens, dtype=np.int64)
    batch = Batch(positions, positions, np.zeros_like(positions), np.array([tokens - 1]))
    away = [torch.empty_like(part[:, 0]) for part in (kv.keys, kv.values)]

    def compute() -> None:
        model.forward(batch, kv)

    def copy() -> None:
        for part, kept in zip((kv.keys, kv.values), away, strict=True):
            kept.copy_(part[:, 0])
            part[:, 0].copy_(kept)

    return {
        "seconds_per_token": _median_seconds(compute, model) / tokens,
        "copy_seconds_per_token": _median_seconds(copy, model) / tokens,
        "kv_bytes_per_token": slot_bytes / tokens,
    }


def _median_seconds(work: Callable[[], None], model: Transformer, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if model.backend.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


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


def _figures(
    policy: str, pool: float, budget: int, run: bare.Run, different: int, seconds_per_token: float
) -> dict[str, Any]:
    summary = run.summary()
    recomputed = sum(t.recomputed_tokens for t in run.requests)
    thinned = run.records[:: max(1, len(run.records) // QUEUE_POINTS)]
    return {
        "policy": policy,
        "pool": pool,
        "kv_tokens": budget,
        "total": len(run.requests),
        "preemptions_per_request": summary["preemptions"] / len(run.requests),
        "recomputed_tokens": recomputed,
        "recompute_share": recomputed * seconds_per_token / run.seconds,
        "different": different,
        **summary,
        "queue": [[record.started - run.started, record.waiting] for record in thinned],
    }


def _table(report: Report, data: dict[str, Any]) -> None:
    columns = {
        "pool": "pool",
        "kv_tokens": "tokens",
        "completed": "done",
        "preemptions_per_request": "preempted",
        "recomputed_tokens": "recomputed",
        "recompute_share": "of the time",
        "tokens_per_s": "tokens/s",
        "ttft_p50": "TTFT p50",
        "ttft_p95": "p95",
        "e2e_p95": "E2E p95",
        "different": "different",
    }
    rows = []
    for r in data["runs"]:
        shown = r | {"pool": f"{r['pool']:.0%}", "completed": f"{r['completed']}/{r['total']}"}
        shown["recompute_share"] = f"{r['recompute_share']:.0%}"
        rows.append([r["policy"], *(shown[key] for key in columns)])
    report.table(
        f"The pool they need: {data['need_kv_tokens']:,} KV tokens. Preempted: times per request; times in s",
        ["policy", *columns.values()],
        rows,
    )
    cost = data["recompute"]
    report.note(
        f"A forgotten token costs {1e3 * cost['seconds_per_token']:.2f} ms to compute again. Its KV is "
        f"{cost['kv_bytes_per_token'] / 1024:.0f} KiB, which this machine's memory copies out and back in "
        f'{1e3 * cost["copy_seconds_per_token"]:.3f} ms. "Of the time": recomputing, the most that a free '
        "swap could save."
    )


def _draw(report: Report, runs: list[dict[str, Any]]) -> None:
    places = np.arange(len(POOLS))
    width = 0.8 / len(POLICIES)
    labels = [f"{pool:.0%}" for pool in POOLS]
    with report.chart(rows=2, columns=2, size=(13, 9)) as (figure, ((speed, again), (first, queue))):
        for index, policy in enumerate(POLICIES):
            own = [r for r in runs if r["policy"] == policy]
            at = places + (index - (len(POLICIES) - 1) / 2) * width
            speed.bar(at, [r["tokens_per_s"] for r in own], 0.9 * width, label=policy)
            again.bar(at, [r["preemptions_per_request"] for r in own], 0.9 * width)
            p50, p95 = (np.array([r[key] for r in own]) for key in ("ttft_p50", "ttft_p95"))
            errors = [np.zeros(len(own)), p95 - p50]
            first.bar(at, p50, 0.9 * width, yerr=errors, error_kw={"lw": 1.2, "ecolor": MUTED})
        for axes, title, unit in (
            (speed, "Throughput", "output tokens/s"),
            (again, "Preemptions", "per request"),
            (first, "Time to first token: p50, line to p95", "seconds from arrival"),
        ):
            axes.set_title(title)
            axes.set_ylabel(unit)
            axes.set_xlabel("KV pool, of what the requests need")
            axes.set_xticks(places, labels)
        for pool, color in zip(POOLS, PALETTE, strict=False):
            r = next(r for r in runs if r["policy"] == "fcfs" and r["pool"] == pool)
            queue.step(*np.array(r["queue"]).T, where="post", color=color, label=f"pool {pool:.0%}")
        queue.set_title("Queue under fcfs")
        queue.set_ylabel("requests waiting")
        queue.set_xlabel("seconds")
        queue.legend()
        figure.legend(*speed.get_legend_handles_labels(), loc="outside upper center", ncols=len(POLICIES))
