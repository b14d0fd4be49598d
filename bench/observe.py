"""The pictures of docs/observe.md: one long prompt stalls everybody, seen in each of the tools.

A served engine in mode `separate`, ten streams that decode, one long prompt among them. The page, the
trace and the Ray dashboard are pictured by headless Chromium, the trace file is drawn as its viewer
lays it out, and the slow step is found again in the span files.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from contextlib import AbstractContextManager
from typing import Any

import httpx

from bench.chromium import Page, chromium_missing, open_page
from bench.client import kept_busy
from bench.report import REPO, BenchError, Report
from bench.serving import Server, served
from bench.trace import Step, steps_of_spans, steps_of_trace
from engine_actor.chrome_trace import FIRST_SLOT_TRACK, STEPS_TRACK

DECODERS = 10
DECODE_TOKENS = 110
LONG_PROMPT = 1200
"""Tokens of the prompt that stalls everybody."""
COLUMN = 10
"""Pixels of the page's grid per step."""
BEFORE = 100
"""Steps before the long prompt comes."""
AFTER = 30
"""Steps shown after the slow one."""
COLOURS = {"prefill": "#F0A202", "decode": "#1F6FB2", "sample": "#2CA58D", "token": "#1F6FB2"}
BETWEEN_TOKENS = "#CBDDEE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", action="store_true", help="copy the pictures into docs/pictures")


def run(args: argparse.Namespace) -> int:
    if missing := chromium_missing():
        raise BenchError(missing)
    report = Report("observe", args.out)
    settings = {"mode": "separate", "max_num_seqs": 12}
    # Ray's dashboard would ask the picture's browser for a token.
    environment = {"RAY_AUTH_MODE": "disabled"}
    with served(settings, environment=environment) as server:
        with _load(server):
            with open_page(server.url, height=1040) as page:
                page.wait(lambda: page.painted() > 2000, "streams", 60)
                # A full picture: streams that came and went before the long prompt does.
                page.wait(lambda: _steps(server) > BEFORE, "steps", 120)
                _complete(server, [7] * LONG_PROMPT, 24, "long-prompt")
            trace = httpx.get(f"{server.url}/trace?seconds=120", timeout=60).json()
            slow = max(steps_of_trace(trace), key=lambda step: step.seconds)
            for theme in ("light", "dark"):
                with open_page(server.url, height=1040, theme=theme) as page:
                    page.wait(lambda page=page: page.painted() > 2000, "cells")  # type: ignore[misc]
                    time.sleep(2)
                    _show(page, slow, _slot(trace, slow.number))
                    _keep(page, report, f"page-{theme}")
        dashboard = re.search(r"http://127\.0\.0\.1:\d+", server.log.partition("dashboard")[2])
        if dashboard:
            _picture_dashboard(report, dashboard[0])
        spans = list(steps_of_spans(server.run_dir / "traces"))
    (args.out / "perfetto.json").write_text(json.dumps(trace))
    _draw(report, trace, slow)
    again = max(spans, key=lambda step: step.seconds)
    report.table(
        "The slowest step, in two tools",
        ["", "engine", "step", "ms", "prefill rows", "decode rows", "requests"],
        [
            [tool, s.engine, s.number, s.seconds * 1e3, s.prefill_rows, s.decode_rows, len(s.requests)]
            for tool, s in (("/trace", slow), ("span files", again))
        ],
    )
    if args.docs:
        pictures = REPO / "docs" / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        for picture in args.out.glob("observe-*.png"):
            shutil.copy(picture, pictures / picture.name)
        report.say(f"copied the pictures to {pictures}")
    return report.finish({"slowest": vars(slow), "slowest_in_spans": vars(again)})


def _load(server: Server) -> AbstractContextManager[None]:
    """Streams that decode all the time."""
    return kept_busy(
        lambda number: _complete(
            server, f"Story {number}:", DECODE_TOKENS - 8 * number, f"reader-{number % 3}"
        ),
        DECODERS,
    )


def _complete(server: Server, prompt: str | list[int], tokens: int, tenant: str) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"X-Tenant-Id": tenant}, timeout=300
    ).raise_for_status()


def _steps(server: Server) -> int:
    trace = httpx.get(f"{server.url}/trace?seconds=600", timeout=60).json()
    return int(trace["otherData"]["steps"])


def _slot(trace: dict[str, Any], step: int) -> int:
    """The slot that prefilled in a step."""
    chunk = next(
        event
        for event in trace["traceEvents"]
        if event["name"].startswith("chunk ") and event["args"]["step"] == step
    )
    return int(chunk["tid"]) - FIRST_SLOT_TRACK


def _show(page: Page, slow: Step, slot: int) -> None:
    """Scrub to shortly after the slow step and open the request that caused it."""
    page.driver.execute_script(
        """const slider = document.getElementById("scrub");
        slider.value = arguments[0];
        slider.dispatchEvent(new Event("input"));""",
        slow.number + AFTER,
    )
    time.sleep(0.5)
    page.driver.execute_script(
        """const canvas = document.getElementById("grid"), box = canvas.getBoundingClientRect();
        const row = (canvas.clientHeight - 66) / arguments[2];
        canvas.dispatchEvent(new MouseEvent("click", {
          clientX: box.right - (arguments[0] + 0.5) * arguments[3],
          clientY: box.top + 46 + row * (arguments[1] + 0.5),
        }));""",
        AFTER - 3,
        slot,
        12,
        COLUMN,
    )
    page.wait(lambda: "long-prompt" in page.text("request"), "the long request")
    time.sleep(0.5)


def _keep(page: Page, report: Report, name: str) -> None:
    path = report.out / f"observe-{name}.png"
    page.driver.save_screenshot(str(path))
    report.say(f"wrote {path}")


def _picture_dashboard(report: Report, url: str) -> None:
    with open_page(f"{url}/#/actors", width=1720, height=760) as page:
        time.sleep(6)
        _keep(page, report, "ray-dashboard")


def _draw(report: Report, trace: dict[str, Any], slow: Step) -> None:
    """The tracks around the slow step, as Perfetto lays them out."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    [stall] = [e for e in events if e["tid"] == STEPS_TRACK and e["name"] == f"step {slow.number}"]
    start, end = stall["ts"] - 0.3 * stall["dur"], stall["ts"] + 1.3 * stall["dur"]
    tracks = sorted({event["tid"] for event in events})
    with report.chart("trace", size=(11, 5.4)) as (_, axes):
        for event in events:
            left, right = max(event["ts"], start), min(event["ts"] + event["dur"], end)
            if right <= left or event["name"] not in COLOURS:
                continue
            waits = event["name"] == "decode" and event["tid"] != STEPS_TRACK
            axes.barh(
                tracks.index(event["tid"]),
                (right - left) / 1e3,
                left=(left - start) / 1e3,
                height=0.72,
                color=BETWEEN_TOKENS if waits else COLOURS[event["name"]],
                edgecolor="white",
                linewidth=0.4,
            )
        axes.set_yticks(
            range(len(tracks)),
            ["steps" if track == STEPS_TRACK else f"slot {track - FIRST_SLOT_TRACK}" for track in tracks],
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, (end - start) / 1e3)
        axes.set_xlabel("milliseconds")
        axes.set_title(f"Step {slow.number}: {slow.prefill_rows} prompt tokens, and nobody else gets one")
        legend = {"prefill": COLOURS["prefill"], "a token": COLOURS["token"], "no token": BETWEEN_TOKENS}
        for name, colour in legend.items():
            axes.barh([0], [0], color=colour, label=name)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(legend))
