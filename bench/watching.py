"""What the live page costs while it is open: a served engine, watched and unwatched in turns.

Tokens/s alone would not tell: on a shared machine windows of a few seconds differ by more than the page
costs. So the bar is on what causes the cost: processor time of the server's other threads, all but the
busiest one per CPU, which are those the engine computes with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.client import kept_busy
from bench.report import BenchError, Report
from bench.samples import Pairs, in_turns
from bench.serving import Server, served

BAR = 0.01
"""Of the machine's processor time."""
CPUS = len(os.sched_getaffinity(0))
STREAMS = 16
MOST_ROUNDS = 30
FILL_SECONDS = 5.0
SETTLE_SECONDS = 2.0
"""A page that opens fetches the last minute: once, so that is not what watching costs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="windows of each kind, or more (default: 10)")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of a window (default: 5)")


def run(args: argparse.Namespace) -> int:
    report = Report("watching", args.out)
    with served() as server, _streams(server.url):
        time.sleep(FILL_SECONDS)

        def window(page: AbstractContextManager[None]) -> tuple[float, float]:
            with page:
                time.sleep(SETTLE_SECONDS)
                return _window(server, args.window)

        turns = in_turns(
            {
                "watched": lambda: window(_page(server.url)),
                "unwatched": lambda: window(contextlib.nullcontext()),
            },
            args.rounds,
            at_most=max(args.rounds, MOST_ROUNDS),
            settled=lambda turns: _added(turns).clear_of(BAR),
        )
    rates = {kind: [rate for rate, _ in found] for kind, found in turns.items()}
    shares = {kind: [share for _, share in found] for kind, found in turns.items()}
    ratios, cost = Pairs.ratios(rates["watched"], rates["unwatched"]), _added(turns)
    rows = [(kind, median(r), min(r), max(r), 100 * median(shares[kind])) for kind, r in rates.items()]
    heads = ["", "tokens/s: median", "lowest", "highest", "other threads' % of the machine"]
    report.table("A busy engine with a page open and without", heads, rows)
    report.note(
        f"Tokens/s watched / unwatched: {ratios}. The last column: processor time taken by everything but "
        f"the {CPUS} busiest threads, of all that the machine has; an open page adds {cost}."
    )
    report.at_most("processor time that an open page adds / the machine's", cost.median, BAR)
    data: dict[str, Any] = {"cost": cost.median, "shares": shares, "tokens_per_s": rates}
    data |= {"tokens_per_s_ratio": ratios.median, "tokens_per_s_ratios": ratios.values}
    return report.finish(data)


def _added(turns: dict[str, list[tuple[float, float]]]) -> Pairs:
    both = zip(turns["watched"], turns["unwatched"], strict=True)
    return Pairs([on - off for (_, on), (_, off) in both])


def _window(server: Server, seconds: float) -> tuple[float, float]:
    """Tokens/s, and the share of the machine's processor time that all but its CPUS busiest threads take."""
    tokens, used, started = _tokens(server.url), _thread_seconds(server), time.monotonic()
    time.sleep(seconds)
    spent = [total - used.get(thread, 0.0) for thread, total in _thread_seconds(server).items()]
    elapsed = time.monotonic() - started
    # The engine computes with a thread on each core, and no other thread comes near what these take.
    beside = sum(sorted(spent, reverse=True)[CPUS:])
    return (_tokens(server.url) - tokens) / elapsed, beside / elapsed / CPUS


def _thread_seconds(server: Server) -> dict[Path, float]:
    """Processor time of each of the server's threads so far."""
    found = {}
    for task in (task for pid in server.pids() for task in Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            # In nanoseconds; `stat` counts in ticks, which miss threads that wake for less.
            found[task] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _tokens(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return sum(s.value for f in families if f.name == "slotserve_output_tokens" for s in f.samples)


@contextmanager
def _page(url: str) -> Iterator[None]:
    """Read the feed as a page does. Raises BenchError if there is none, or if it ends by itself."""
    stopping = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/live", timeout=30) as response:
            response.raise_for_status()
            for _ in response.iter_raw():
                if stopping.is_set():
                    return
        raise BenchError("the live page's feed ended")

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            stopping.set()
        try:
            reading.result()
        except httpx.HTTPStatusError as error:
            raise BenchError(f"{url}/live answered {error.response.status_code}") from error
        except httpx.HTTPError as error:
            raise BenchError(f"the live page's feed broke off: {error}") from error


def _streams(url: str) -> AbstractContextManager[None]:
    """Keep every slot busy, with requests that answer whole: HTTP streaming is not measured here."""

    def ask(number: int) -> None:
        body = {"prompt": f"Story {number}:", "max_tokens": 60 + 5 * number, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    return kept_busy(ask, STREAMS)
