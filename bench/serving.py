"""A real `serve run`, for experiments and tests.

    with served({"num_engines": 2}) as server:
        httpx.get(f"{server.url}/health")

Each server has its own Ray cluster, ports and temporary directory, and takes them all down when the
block ends. `settings` are the `args` of serve_config.yaml (app/config.py); `server.log` is what it
printed. Starting one takes 15 - 20 s: share it within a module.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.haproxy import free_port, haproxy
from bench.origin import REPO
from bench.report import BenchError

START_SECONDS = 180.0
STOP_SECONDS = 60.0
LEAVE_SECONDS = 15.0


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    directory: Path
    """Its temporary directory: `run/` is its run_dir, `ray/` its Ray session."""

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def pids(self, title: str = "") -> list[int]:
        """Living processes of this server whose command line holds `title`, such as an actor's class."""
        mine = str(self.directory).encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                environment = (entry / "environ").read_bytes()
                if mine in environment and title in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def served(
    settings: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server with `settings` over the defaults, wait until all engines are up, stop it at the end.

    HAProxy stands in front of it, as in `make serve`. Raises BenchError if it does not become healthy.
    """
    directory = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
    command = [str(Path(sys.executable).with_name("serve")), "run", str(directory / "config.yaml")]
    with launched(command, directory, settings, {**haproxy(str(directory)), **(environment or {})}) as server:
        _wait_until_healthy(server)
        yield server


@contextlib.contextmanager
def launched(
    command: Sequence[str],
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path = REPO,
) -> Iterator[Server]:
    """Start `command` for a server whose files lie in `directory`, `config.yaml` among them; end both."""
    port = write_config(directory, settings)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(directory), "PYTHONUNBUFFERED": "1", **(environment or {})}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Whoever was started in the background has inherited a deaf ear to the signal that `stop` sends.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    server = Server(f"http://127.0.0.1:{port}", process, directory)
    try:
        yield server
    finally:
        stop(server)
        shutil.rmtree(directory, ignore_errors=True)


def write_config(directory: Path, settings: Mapping[str, Any] | None = None) -> int:
    """Write `config.yaml` for a server whose files lie in `directory`. Returns its HTTP port, a free one."""
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
                # Experiments repeat their workloads: what one turn computed must not help the next.
                "args": {"run_dir": str(directory / "run"), "prefix_reuse": "off", **(settings or {})},
            }
        ],
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return port


def stop(server: Server) -> list[int]:
    """End the server as Ctrl-C would. Returns the processes that had to be killed: none, if all is well."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(STOP_SECONDS)
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := server.pids()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            # Until the application is deployed the proxy lets the question wait.
            health = httpx.get(f"{server.url}/health", timeout=30)
            if health.is_success and all(e["state"] == "up" for e in health.json()["engines"].values()):
                return
        time.sleep(0.25)
    raise BenchError(f"the server did not become healthy; its log ends:\n{server.log[-5000:]}")
