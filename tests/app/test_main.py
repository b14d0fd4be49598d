"""`python -m app` says what is wrong in one sentence, before Ray starts, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
import torch
import yaml

from app.haproxy import free_port
from tests.serving import Server


def refusal(directory: Path, text: str) -> str:
    config = directory / "config.yaml"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "app", "--config", str(config)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("applications: [{args: {max_num_seqs: 0, speed: 9}}]", "max_num_seqs: .* speed: "),
        ("applications: [{args: {policy: fifo}}]", "unknown policy 'fifo'; there are fcfs, "),
        ("applications: [{args: {model: /nowhere}}]", "no model at /nowhere"),
        ("applications: [{args: {dtype: bfloat16}}]", "CPU kernels compute in float32"),
        ("applications: [{}]\nhttp_options: {port: 99999}", "not a port number"),
        ("settings: {}", "applications"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")
def test_a_bad_configuration_is_refused_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    assert re.search(reason, refusal(tmp_path, text))


def test_a_taken_port_is_refused_before_another_server_answers(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = f"applications: [{{}}]\nhttp_options: {{port: {port}}}"
        assert f"127.0.0.1:{port}" in refusal(tmp_path, text)


def test_a_service_manager_that_ends_it_ends_the_whole_server() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
    port = free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "grpc_options": {"port": free_port()},
        "applications": [
            {
                "name": "slotserve",
                "route_prefix": "/",
                "import_path": "app.ingress:build",
                "args": {"run_dir": str(directory / "run"), "max_num_seqs": 2, "max_len": 256},
            }
        ],
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "--config", str(directory / "config.yaml")],
            env={**environment, "RAY_TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, directory)
    try:
        deadline = time.monotonic() + 120
        while "slotserve is ready" not in server.log:
            assert process.poll() is None, server.log[-2000:]
            assert time.monotonic() < deadline, server.log[-2000:]
            time.sleep(0.5)
        assert httpx.get(f"{server.url}/health", timeout=30).is_success
        process.terminate()
        process.wait(60)
        deadline = time.monotonic() + 15
        while server.pids() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.pids() == []
    finally:
        for pid in server.pids():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
