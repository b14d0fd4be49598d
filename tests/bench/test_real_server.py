"""The client, the trace and Locust against a real `serve run` with the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import client, observed, workload
from bench.client import Endpoint
from bench.origin import REPO
from bench.serving import served
from engine_actor.clock import wall


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    with served({"max_num_seqs": 4, "max_len": 256}) as running:
        yield Endpoint(running.url)


def test_a_workload_gets_all_its_tokens_and_the_trace_tells_its_steps(
    server: Endpoint, tmp_path: Path
) -> None:
    load = workload.preset("smoke", requests=16).arriving(None)
    run = client.drive(server, load)
    assert run.errors == []
    assert [len(t.token_times) for t in run.requests] == [i.output_tokens for i in load.items]
    seen = observed.cut(
        observed.fetch(server, 120, tmp_path / "trace.json"), wall(run.started), wall(run.ended)
    )
    assert seen.slots == 4
    assert len(seen.steps) >= max(item.output_tokens for item in load.items)
    utilization = seen.utilization()
    assert utilization is not None
    assert 0.3 < utilization <= 1
    assert any(step.waiting for step in seen.steps)


def test_a_closed_loop_starts_with_the_first_in_the_slots_and_the_rest_in_the_queue(
    server: Endpoint, tmp_path: Path
) -> None:
    load = workload.preset("smoke", requests=12)
    run = client.drive(server, load, queued_at=4)
    assert run.errors == []
    assert min(timeline.ttft for timeline in run.requests) > 0
    seen = observed.cut(
        observed.fetch(server, 120, tmp_path / "trace.json"), wall(run.started), wall(run.ended)
    )
    assert seen.steps[0].waiting == len(load) - 4


def test_locust_streams_and_counts_every_token(server: Endpoint, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", "locustfile.py", "--headless", "--host", server.url),
            *("--users", "6", "--spawn-rate", "100", "--only-summary", "--preset", "smoke"),
            *("--requests", "16", "--cancel", "0.25", "--json-file", str(tmp_path / "stats")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr
    outcome = re.search(r"(\d+) answers complete, (\d+) cancelled, 0 failed", done.stdout)
    assert outcome is not None, done.stdout
    assert int(outcome[1]) + int(outcome[2]) == 16
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "stats.json").read_text())}
    assert entries["TTFT"]["num_requests"] == 16
    assert entries["ITL"]["num_requests"] > 16
