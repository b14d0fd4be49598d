"""The pictures of docs/observe.md: one long prompt stalls everybody, seen in each of the tools.

A served engine in mode `separate`, ten streams that decode, one long prompt among them. The page, the
trace and the Ray dashboard are pictured by headless Chromium, the trace file is drawn as its viewer
lays it out, and the slow step is found again in the span files.
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from typing import Any

import httpx

from bench import observed
from bench.chart import CONTINUOUS
from bench.chromium import Page, chromium_missing, open_page
from bench.client import Endpoint, kept_busy
from bench.observed import Step
from bench.origin import REPO
from bench.report import BenchError, Report
from bench.serving import served
from bench.trace import COLUMNS, row, steps_of_spans
from engine_actor.chrome_trace import FIRST_SLOT_TRACK

DECODERS = 10
DECODE_TOKENS = 110
LONG_PROMPT = 1200
"""Tokens of the prompt that stalls everybody."""
SLOTS = 12
COLUMN = 10
"""Pixels of the page's grid per step."""
BEFORE = 100
"""Steps before the long prompt comes."""
AFTER = 30
"""Steps shown after the slow one."""
PREFILL = "#F0A202"
SHOW = """const slider = document.getElementById("scrub");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));"""
CLICK = """const canvas = document.getElementById("grid"), box = canvas.getBoundingClientRect();
const row = (canvas.clientHeight - 66) / arguments[2];
canvas.dispatchEvent(new MouseEvent("click", {
  clientX: box.right - (arguments[0] + 0.5) * arguments[3],
  clientY: box.top + 46 + row * (arguments[1] + 0.5),
}));"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", action="store_true", help="copy the pictures into docs/pictures")


def run(args: argparse.Namespace) -> int:
    if missing := chromium_missing():
        raise BenchError(missing)
    report = Report("observe", args.out)
    # Ray's dashboard would ask the picture's browser for a token.
    with served(
        {"mode": "separate", "max_num_seqs": SLOTS}, environment={"RAY_AUTH_MODE": "disabled"}
    ) as server:
        here = Endpoint(server.url)

        def fetch(seconds: float) -> dict[str, Any]:
            return observed.fetch(here, seconds, args.out / "perfetto.json")

        def read(number: int) -> None:
            _complete(here, f"Story {number}:", DECODE_TOKENS - 8 * number, f"reader-{number % 3}")

        with kept_busy(read, DECODERS):
            with open_page(server.url, height=1040) as page:
                page.wait(lambda: page.painted() > 2000, "streams", 60)
                # A full picture: streams that came and went before the long prompt does.
                page.wait(lambda: fetch(600)["otherData"]["steps"] > BEFORE, "steps", 120)
                _complete(here, [7] * LONG_PROMPT, 24, "long-prompt")
            trace = fetch(120)
            slow = max(observed.steps(trace), key=lambda step: step.seconds)
            for theme in ("light", "dark"):
                with open_page(server.url, height=1040, theme=theme) as page:
                    page.wait(lambda page=page: page.painted() > 2000, "cells")  # type: ignore[misc]
                    time.sleep(2)
                    _show(page, slow, _slot(trace, slow.number))
                    _keep(page, report, f"page-{theme}")
        if dashboard := re.search(r"http://127\.0\.0\.1:\d+", server.log.partition("dashboard")[2]):
            with open_page(f"{dashboard[0]}/#/actors", width=1720, height=760) as page:
                time.sleep(6)
                _keep(page, report, "ray-dashboard")
        again = max(steps_of_spans(server.run_dir / "traces"), key=lambda step: step.seconds)
    _draw(report, trace, slow)
    found = [("/trace", *row(slow)), ("span files", *row(again))]
    report.table("The slowest step, in two tools", ["", *COLUMNS], found)
    if args.docs:
        pictures = REPO / "docs" / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        for picture in args.out.glob("observe-*.png"):
            shutil.copy(picture, pictures / picture.name)
        report.say(f"copied the pictures to {pictures}")
    return report.finish({"slowest": vars(slow), "slowest_in_spans": vars(again)})


def _complete(here: Endpoint, prompt: str | list[int], tokens: int, tenant: str) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    url, headers = f"{here.url}/v1/completions", here.headers(tenant)
    httpx.post(url, json=body, headers=headers, timeout=300).raise_for_status()


def _slot(trace: observed.Trace, step: int) -> int:
    """The slot that prefilled in a step."""
    chunks = (event for event in trace["traceEvents"] if event["name"].startswith("chunk "))
    return next(int(event["tid"]) - FIRST_SLOT_TRACK for event in chunks if event["args"]["step"] == step)


def _show(page: Page, slow: Step, slot: int) -> None:
    """Scrub to shortly after the slow step and open the request that caused it."""
    page.driver.execute_script(SHOW, slow.number + AFTER)
    time.sleep(0.5)
    page.driver.execute_script(CLICK, AFTER - 3, slot, SLOTS, COLUMN)
    page.wait(lambda: "long-prompt" in page.text("request"), "the long request")
    time.sleep(0.5)


def _keep(page: Page, report: Report, name: str) -> None:
    path = report.out / f"observe-{name}.png"
    page.driver.save_screenshot(str(path))
    report.say(f"wrote {path}")


def _draw(report: Report, trace: observed.Trace, slow: Step) -> None:
    """The slots around the slow step."""
    start = slow.started - 0.3 * slow.seconds
    seen = observed.cut(trace, start, slow.started + 1.3 * slow.seconds)
    with report.chart("trace", size=(11, 5.4)) as (_, axes):
        seen.draw(axes, CONTINUOUS, PREFILL)
        first = start - seen.steps[0].started
        axes.set_xlim(first, first + 1.6 * slow.seconds)
        axes.set_xlabel("seconds; amber: prefill, blue: a token, grey: no token")
        axes.set_title(f"Step {slow.number}: {slow.prefill_rows} prompt tokens, and nobody else gets one")
