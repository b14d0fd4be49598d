"""From `python -m app` to the first chat answer: without any cache, with all of them, and what it weighs."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.origin import REPO
from bench.report import BenchError, Report
from bench.serving import START_SECONDS, Server, launched

COLD_SECONDS, WARM_SECONDS = 20.0, 12.0
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
REPLICA = "ray::ServeReplica:slotserve:Ingress"


@dataclass(frozen=True)
class Start:
    """One start of a server."""

    seconds: float
    replica_rss_mb: float
    launcher_rss_mb: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default: 3)")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, in turns")


def run(args: argparse.Namespace) -> int:
    report = Report("startup", args.out)
    with contextlib.ExitStack() as stack:
        sides = {"now": REPO}
        if args.against:
            sides = {"before": stack.enter_context(_checkout(args.against)), **sides}
        starts: dict[str, dict[str, list[Start]]] = {side: {"cold": [], "warm": []} for side in sides}
        with report.progress("starts", 2 * args.rounds * len(sides)) as advance:
            for _ in range(args.rounds):
                for side, repo in sides.items():
                    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as caches:
                        for kind in ("cold", "warm"):
                            starts[side][kind].append(_start(repo, Path(caches)))
                            advance()
    figures = {side: _figures(kinds) for side, kinds in starts.items()}
    names = {
        "cold_s": "cold start, s",
        "warm_s": "warm start, s",
        "replica_rss_mb": "HTTP replica, MB",
        "launcher_rss_mb": "launcher, MB",
    }
    report.table(
        "From `python -m app` to the first chat answer",
        ["", *figures],
        [[names[name], *(side[name] for side in figures.values())] for name in names],
    )
    report.note(
        "Cold: no compiled kernels and no converted tokenizer are cached. Warm: an earlier start left both. "
        f"Medians of {args.rounds}; memory is resident memory after the first answer."
    )
    now = figures["now"]
    report.at_most("cold start", now["cold_s"], COLD_SECONDS, " s")
    report.at_most("warm start", now["warm_s"], WARM_SECONDS, " s")
    return report.finish({**now, "against": args.against, "before": figures.get("before")})


def _figures(kinds: dict[str, list[Start]]) -> dict[str, float]:
    every = [start for starts in kinds.values() for start in starts]
    return {
        "cold_s": statistics.median(start.seconds for start in kinds["cold"]),
        "warm_s": statistics.median(start.seconds for start in kinds["warm"]),
        "replica_rss_mb": statistics.median(start.replica_rss_mb for start in every),
        "launcher_rss_mb": statistics.median(start.launcher_rss_mb for start in every),
    }


@contextlib.contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """The tree of another commit, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as directory:
        archive = subprocess.run(["git", "-C", str(REPO), "archive", commit], capture_output=True)
        if archive.returncode:
            raise BenchError(f"cannot check out {commit}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        yield Path(directory)


def _start(repo: Path, caches: Path) -> Start:
    """Start the server of `repo`, ask one question, end it. What it caches stays in `caches`."""
    directory = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
    command = [sys.executable, "-m", "app", "--config", str(directory / "config.yaml")]
    settings = {"run_dir": str(caches / "run")}
    environment = {"NUMBA_CACHE_DIR": str(caches / "kernels")}
    started = time.monotonic()
    with launched(command, directory, settings, environment, cwd=repo) as server:
        _ask(server, started + START_SECONDS)
        seconds = time.monotonic() - started
        (replica,) = server.pids(REPLICA)
        return Start(seconds, _resident_mb(replica), _resident_mb(server.process.pid))


def _ask(server: Server, deadline: float) -> None:
    """Ask until there is an answer. Raises BenchError when there is none by `deadline`."""
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=30).is_success:
                return
        time.sleep(0.1)
    raise BenchError(f"no answer; the server's log ends:\n{server.log[-3000:]}")


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
