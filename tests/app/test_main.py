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
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
import yaml

from app import __main__ as launcher
from app.haproxy import free_port
from app.serve_log import ServeLog
from tests.app.gguf_files import byte_level
from tests.serving import Server, write_config


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
        ("applications: [{args: }]", "args is empty"),
        ("applications: [{route_prefix: }]", "route_prefix is empty"),
        ("applications: [{}]\nhttp_options:", "http_options is empty"),
        ("applications: [{}]\nhttp_options: local", "http_options cannot be 'local'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")
def test_a_bad_configuration_is_refused_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    assert re.search(reason, refusal(tmp_path, text))


def test_a_tokenizer_that_is_not_known_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = byte_level(tmp_path / "x.gguf", "of-tomorrow")
    said = refusal(tmp_path, f"applications: [{{args: {{model: {model}, run_dir: {tmp_path}}}}}]")
    assert "cannot use the model: the pre-tokenizer 'of-tomorrow'" in said


def test_a_taken_port_is_refused_before_another_server_answers(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = f"applications: [{{}}]\nhttp_options: {{port: {port}}}"
        assert f"127.0.0.1:{port}" in refusal(tmp_path, text)


def test_a_route_prefix_is_part_of_every_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    class Started:
        def __init__(self, *_: object, **__: object) -> None:
            self.stdout = [b"View the dashboard at \x1b[1mhttp://127.0.0.1:8266\x1b[22m\n"]

        returncode: int | None = None

        def poll(self) -> int | None:
            return self.returncode

        def wait(self) -> int:
            self.returncode = 0
            return 0

    def get(url: str, timeout: float) -> httpx.Response:
        asked.append(url)
        for thread in threading.enumerate():
            if thread.name == "serve-log":
                thread.join()
        return httpx.Response(200)

    url = f"http://127.0.0.1:{(port := free_port())}/llm"
    config = tmp_path / "config.yaml"
    application = {"route_prefix": "/llm", "args": {"run_dir": str(tmp_path)}}
    config.write_text(yaml.safe_dump({"applications": [application], "http_options": {"port": port}}))
    monkeypatch.setattr(sys, "argv", ["app", "--config", str(config), "--python-proxy"])
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(httpx, "get", get)
    assert launcher.main() == 0
    assert asked == [f"{url}/health"]
    told = capsys.readouterr().out
    assert f"curl -N {url}/v1/chat/completions" in told
    assert f"{url}/\n" in told
    assert "http://127.0.0.1:8266 " in told


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
def test_whatever_ends_the_launcher_ends_the_whole_server(numbers: list[signal.Signals]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
    port = write_config(directory, {"max_num_seqs": 2, "max_len": 256})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "--config", str(directory / "config.yaml")],
            env={**environment, "RAY_TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Under nohup the tests have it ignored, and so would the launcher.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
    server = Server(f"http://127.0.0.1:{port}", process, directory)
    try:
        deadline = time.monotonic() + 180
        while "slotserve is ready" not in server.log:
            assert process.poll() is None, server.log[-2000:]
            assert time.monotonic() < deadline, server.log[-2000:]
            time.sleep(0.5)
        assert httpx.get(f"{server.url}/health", timeout=30).is_success
        # What Ray has to say about itself is for the file alone.
        before = server.log.partition("slotserve is ready")[0]
        assert "bit-exact" in before
        assert "ServeController" not in before
        assert "ServeController" in (directory / "run" / "serve.log").read_text()
        for number in numbers:
            process.send_signal(number)
        process.wait(60)
        deadline = time.monotonic() + 15
        while server.pids() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.pids() == []
    finally:
        for pid in server.pids():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"applications: [{{import_path: app.nowhere:build, args: {{run_dir: {tmp_path}}}}}]\n"
        f"http_options: {{port: {free_port()}}}\ngrpc_options: {{port: a lot}}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "app", "--config", str(config)],
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "port" in done.stdout
    assert f"All that was printed: {tmp_path / 'serve.log'}" in done.stdout.replace("\n", "")


def test_the_log_shows_what_is_ours_or_wrong_and_keeps_all(tmp_path: Path) -> None:
    lines = [
        "\x1b[36m(ServeController pid=1)\x1b[0m INFO Deploying",
        "(slotserve-engine-0 pid=2) a model on cpu",
        "(ServeReplica:slotserve:Ingress pid=3) INFO GET / 200",
        "(HAProxyManager pid=4) ERROR it crashed",
    ]
    shown: list[str] = []
    printed = [f"{line}\n".encode() for line in lines]
    log = ServeLog(tmp_path / "serve.log", shown.append)
    log.read(printed)
    log.join()
    assert shown == lines[1:]
    plain = ["(ServeController pid=1) INFO Deploying", *lines[1:]]
    assert (tmp_path / "serve.log").read_text().splitlines() == log.tail().splitlines() == plain


def test_a_screen_that_is_gone_does_not_stop_the_log(tmp_path: Path) -> None:
    def show(line: str) -> None:
        raise OSError("the terminal is closed")

    log = ServeLog(tmp_path / "serve.log", show)
    log.read([b"(slotserve-engine-0 pid=2) line %d\n" % number for number in range(9)])
    log.join()
    assert len((tmp_path / "serve.log").read_text().splitlines()) == 9


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = (
        f"applications: [{{args: {{run_dir: {tmp_path / 'file'}}}}}]\nhttp_options: {{port: {free_port()}}}"
    )
    assert "cannot write to run_dir" in refusal(tmp_path, text)
