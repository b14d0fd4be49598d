"""Locust as a user starts it, against a server that answers well, badly, or not at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.haproxy import free_port
from bench.origin import REPO
from tests.bench.fake_server import Behaviour, FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(delay=0.004).running() as server:
        yield server


def locust(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "locustfile.py", "--headless", "--host", url]
    common = ["--users", "4", "--spawn-rate", "100", "--only-summary", "--preset", "smoke"]
    return subprocess.run([*command, *common, *options], capture_output=True, text=True, timeout=60, cwd=REPO)


def statistics(path: Path) -> dict[str, dict[str, float]]:
    return {entry["name"]: entry for entry in json.loads(path.read_text())}


def test_ttft_itl_and_tokens_per_s_are_statistics(fake: FakeServer, tmp_path: Path) -> None:
    done = locust(
        fake.url, "--requests", "24", "--tenants", "a=1,b=1", "--priorities", "0=1,-1=1",
        "--json-file", str(tmp_path / "stats"), "--html", str(tmp_path / "load.html"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    entries = statistics(tmp_path / "stats.json")
    tokens = sum(body["max_tokens"] for _, body in fake.seen)
    assert len(fake.seen) == 24
    assert entries["/v1/completions"]["num_requests"] == 24
    assert entries["TTFT"]["num_requests"] == 24
    assert entries["ITL"]["num_requests"] == tokens - 24
    assert entries["output tokens/s"]["total_content_length"] == tokens
    assert entries["E2E"]["num_requests"] == 24
    assert "E2E: p50" in done.stdout
    assert {headers["X-Tenant-Id"] for headers, _ in fake.seen} == {"a", "b"}
    assert {body["priority"] for _, body in fake.seen} == {0, -1}
    assert "24 answers complete, 0 cancelled, 0 failed" in done.stdout
    assert "TTFT" in (tmp_path / "load.html").read_text()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("breaks off", "broke off"), ("error event", "the engine failed"), ("refuses", "HTTP 429")],
)
def test_a_failing_answer_is_counted_and_never_hangs(
    fake: FakeServer, behaviour: Behaviour, message: str
) -> None:
    fake.behaviour = behaviour
    done = locust(fake.url, "--requests", "8")
    assert done.returncode == 1
    assert re.search(rf"8\s+POST /v1/completions: .*{message}", done.stderr), done.stderr
    assert "E2E" not in done.stdout


def test_users_who_hang_up_are_counted_apart_and_the_server_notices(fake: FakeServer) -> None:
    done = locust(fake.url, "--requests", "12", "--cancel", "1")
    assert done.returncode == 0
    assert "0 answers complete, 12 cancelled, 0 failed" in done.stdout
    assert re.search(r"stream\s+cancelled\s+\d", done.stderr)
    assert fake.hung_up > 0
    assert "E2E" not in done.stdout


def test_the_seed_decides_who_hangs_up_and_where(fake: FakeServer, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        file = tmp_path / name
        options = ["--requests", "32", "--cancel", "0.5", "--seed", "7", "--json-file", str(file)]
        assert locust(fake.url, *options).returncode == 0
        entries = statistics(file.with_suffix(".json"))
        found.append([entries[entry]["num_requests"] for entry in ("cancelled", "E2E", "ITL")])
    assert found[0] == found[1]
    assert min(found[0]) > 0


def test_replay_sends_each_request_when_it_is_due_and_ends(fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{0.5 * i},20,5\n" for i in range(5))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    done = locust(fake.url, "--shape", "replay", "--trace", str(trace))
    assert done.returncode == 0
    assert "5 answers complete, 0 cancelled, 0 failed" in done.stdout
    assert len(fake.seen) == 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--preset", "heavy"], "unknown preset 'heavy'"),
        (["--tenants", "a"], "--tenants: expected name=share,..., got 'a'"),
        (["--trace", "/nowhere.csv"], "cannot read the trace /nowhere.csv"),
    ],
)
def test_bad_options_are_one_line(fake: FakeServer, options: list[str], complaint: str) -> None:
    done = locust(fake.url, *options)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_an_absent_server_is_one_line() -> None:
    done = locust("http://127.0.0.1:9")
    assert done.returncode == 2
    assert "no OpenAI-compatible server at http://127.0.0.1:9" in done.stderr


def test_the_web_page_starts_a_run_with_its_own_options(fake: FakeServer) -> None:
    page = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "locust", "-f", "locustfile.py", "--host", fake.url]
    where = ["--web-host", "127.0.0.1", "--web-port", page.rpartition(":")[2]]
    process = subprocess.Popen([*command, *where], cwd=REPO, stderr=subprocess.DEVNULL)
    try:
        until(lambda: httpx.get(page).is_success)
        for run in (1, 2):
            form = {"user_count": 4, "spawn_rate": 10, "host": fake.url, "preset": "smoke", "requests": "9"}
            assert httpx.post(f"{page}/swarm", data=form).json()["success"]
            until(partial(_sent, fake, 9 * run))
            until(lambda: httpx.get(f"{page}/stats/requests").json()["state"] == "stopped")
            entries = {e["name"]: e for e in httpx.get(f"{page}/stats/requests").json()["stats"]}
            assert entries["TTFT"]["num_requests"] == 9
    finally:
        process.terminate()
        process.wait()


def _sent(fake: FakeServer, requests: int) -> bool:
    return len(fake.seen) == requests


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError("it did not happen")
