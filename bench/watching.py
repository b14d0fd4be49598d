"""What the live page costs while it is open: tokens/s of a served engine, watched and unwatched in turns."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.report import BenchError, Report
from bench.serving import served

BAR = 0.99
STREAMS = 16
FILL_SECONDS = 5.0
SETTLE_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="windows of each kind (default: 10)")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of a window (default: 5)")


def run(args: argparse.Namespace) -> int:
    report = Report("watching", args.out)
    rates: dict[str, list[float]] = {"watched": [], "unwatched": []}
    try:
        with served() as server, _streams(server.url):
            time.sleep(FILL_SECONDS)
            with report.progress("windows", 2 * args.rounds) as advance:
                for number in range(2 * args.rounds):
                    # ABBA: a drift of the machine weighs on both sides alike.
                    watched = number % 4 in (1, 2)
                    with _page(server.url) if watched else contextlib.nullcontext():
                        time.sleep(SETTLE_SECONDS)
                        rate = _tokens_per_second(server.url, args.window)
                    rates["watched" if watched else "unwatched"].append(rate)
                    advance()
    except RuntimeError as error:
        raise BenchError(str(error)) from error
    ratios = [on / off for on, off in zip(rates["watched"], rates["unwatched"], strict=True)]
    ratio = statistics.median(ratios)
    rows = [[kind, statistics.median(values), min(values), max(values)] for kind, values in rates.items()]
    report.table("Tokens/s with a page open and without", ["", "median", "lowest", "highest"], rows)
    report.note("A ratio of 1 means that looking costs nothing; it is the median over pairs of windows.")
    report.at_least("tokens/s watched / unwatched", ratio, BAR)
    return report.finish({"ratio": ratio, "ratios": ratios, "tokens_per_s": rates})


def _tokens_per_second(url: str, seconds: float) -> float:
    before, started = _tokens(url), time.monotonic()
    time.sleep(seconds)
    return (_tokens(url) - before) / (time.monotonic() - started)


def _tokens(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return sum(s.value for f in families if f.name == "slotserve_output_tokens" for s in f.samples)


@contextmanager
def _page(url: str) -> Iterator[None]:
    """Read the feed as a page does."""
    stopping = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/live", timeout=30) as response:
            for _ in response.iter_raw():
                if stopping.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stopping.set()
        reader.join()


@contextmanager
def _streams(url: str) -> Iterator[None]:
    """Keep every slot busy, with requests that answer whole: HTTP streaming is not measured here."""
    stopping = threading.Event()

    def ask(number: int) -> None:
        body = {"prompt": f"Story {number}:", "max_tokens": 60 + 5 * number, "ignore_eos": True}
        while not stopping.is_set():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
