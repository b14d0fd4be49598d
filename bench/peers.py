"""Our engine against others: the same weights, workload and concurrency, taking turns in one run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import chart, client, options
from bench.chart import CONTINUOUS, MUTED
from bench.client import Endpoint
from bench.engines.peer import PEERS, Peer
from bench.engines.worker import Setup
from bench.origin import REPO
from bench.report import BenchError, Report
from bench.samples import Pairs
from bench.workload import Workload

OURS, *OTHERS = PEERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    options.add_workload(parser)
    which = f"repeatable; of {', '.join(OTHERS)} (default: all installed)"
    parser.add_argument("--peer", action="append", metavar="NAME", help=which)
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an OpenAI-compatible server as a peer"
    )
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="for --url")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument("--install", action="store_true", help="create the environments of the peers first")


def run(args: argparse.Namespace) -> int:
    report = Report("peers", args.out)
    for name in args.peer or ():
        if name not in OTHERS:
            raise BenchError(f"unknown peer {name!r}; choose from {', '.join(OTHERS)}")
    peers = [PEERS[name] for name in (OURS, *(args.peer or OTHERS))]
    for peer in peers if args.install else ():
        report.say(f"{peer.name}: its environment is {peer.python.parent.parent}")
        peer.install()
    load = options.workload(args, max_len=args.max_len, requests=24)
    report.say(f"{load}, {args.slots} at a time, greedy")
    sides: dict[str, Side] = {}
    turns: dict[str, list[Turn]] = {}
    crashed: dict[str, str] = {}

    @contextmanager
    def alive(name: str) -> Iterator[None]:
        """A side that crashes ends alone."""
        try:
            yield
        except BenchError as error:
            crashed[name] = str(error)
            report.say(f"[red]{error}[/]")

    with ExitStack() as stack:
        for peer in peers:
            if peer.python.exists():
                with alive(peer.name):
                    weights = peer.model(args.model)
                    sides[peer.name] = stack.enter_context(worker(peer, weights, args, args.out))
            else:
                how = f"python -m bench peers --install --peer {peer.name}"
                report.say(f"{peer.name}: not installed, skipped; {how}")
        for named in args.url:
            name, _, url = named.partition("=")
            if not url:
                raise BenchError(f"--url expects NAME=URL, got {named!r}")
            sides[name] = remote(Endpoint(url.rstrip("/"), args.api_key))
        with report.progress("rounds", args.rounds * len(sides)) as advance:
            for _ in range(args.rounds):
                for name, side in sides.items():
                    with alive(name):
                        if name not in crashed:
                            turns.setdefault(name, []).append(side.turn(load))
                    advance()
                report.save({"peers": _figures(load, sides, turns), "crashed": crashed})
    figures = _figures(load, sides, turns)
    if figures:
        _tell(report, load, figures)
    code = report.finish({"workload": str(load), "peers": figures, "crashed": crashed})
    return 2 if crashed else code


@dataclass(frozen=True)
class Turn:
    """One workload on one side."""

    seconds: float
    outputs: list[list[int]] | list[str]
    """Token ids; text from a server that does not tell ids."""
    peak_mib: float | None


@dataclass(frozen=True)
class Side:
    """An engine that takes turns. `turn` raises BenchError when the engine is gone or fails."""

    version: str
    format: str
    turn: Callable[[Workload], Turn]


@contextmanager
def worker(peer: Peer, weights: Path, args: argparse.Namespace, out: Path) -> Iterator[Side]:
    """A peer in its own process, its weights loaded before the first turn."""
    path = out / f"{peer.name}.log"
    setup = json.dumps(vars(Setup(str(weights), args.slots, args.max_len, len(os.sched_getaffinity(0)))))
    command = [str(peer.python), "-m", peer.module, setup]
    pipe = subprocess.PIPE
    with (
        path.open("w") as log,
        subprocess.Popen(command, cwd=REPO, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):

        def answer() -> dict[str, Any]:
            assert process.stdout is not None
            if line := process.stdout.readline():
                found: dict[str, Any] = json.loads(line)
                return found
            code = process.wait()
            last = (path.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise BenchError(f"{peer.name} ended with exit code {code}: {last} (all of it: {path})")

        def turn(load: Workload) -> Turn:
            jobs = [(item.prompt, item.output_tokens) for item in load.items]
            with suppress(BrokenPipeError):
                print(json.dumps(jobs), file=process.stdin, flush=True)
            return Turn(**answer())

        try:
            yield Side(**answer(), turn=turn)
        finally:
            # It leaves by itself when its input ends.
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            process.kill()


def remote(endpoint: Endpoint) -> Side:
    """A server somewhere; its concurrency and number format are its own business."""

    def turn(load: Workload) -> Turn:
        run = client.drive(endpoint, load.arriving(None))
        if run.errors:
            raise BenchError(f"{endpoint.url}: {run.errors[0]}")
        ids = [t.output for t in run.requests]
        return Turn(run.seconds, ids if all(ids) else [t.text for t in run.requests], None)

    return Side(endpoint.model(), "unknown", turn)


def _figures(load: Workload, sides: dict[str, Side], turns: dict[str, list[Turn]]) -> dict[str, Any]:
    ours = turns.get(OURS, [])
    figures = {}
    for name, done in turns.items():
        seconds = [turn.seconds for turn in done]
        both = min(len(ours), len(done))
        figures[name] = {
            "version": sides[name].version,
            "format": sides[name].format,
            "seconds": seconds,
            "tokens_per_s": load.output_tokens / median(seconds),
            "ours_over_theirs": Pairs.ratios(seconds[:both], [t.seconds for t in ours[:both]]).median
            if both
            else None,
            "equal": _equal(ours[0].outputs, done[0].outputs) if ours else None,
            "peak_mib": max((turn.peak_mib for turn in done if turn.peak_mib is not None), default=None),
        }
    return figures


def _equal(reference: Sequence[Any], outputs: Sequence[Any]) -> int | None:
    """Outputs that are the reference's, token by token; None where only text is known."""
    if outputs and isinstance(outputs[0], str):
        return None
    return sum(bool(ours == theirs) for ours, theirs in zip(reference, outputs, strict=True))


def _tell(report: Report, load: Workload, figures: dict[str, Any]) -> None:
    report.records(
        "Output tokens/s, and how many times each we are (median over the rounds)",
        [{"name": name, **f} for name, f in figures.items()],
        "engine: name | version | numbers: format | tokens/s: tokens_per_s | "
        f"ours / theirs: ours_over_theirs | of {len(load)} outputs, equal to fp32 greedy: equal | "
        "peak MiB: peak_mib",
    )
    rates = {name: float(figures[name]["tokens_per_s"]) for name in figures}
    rates = dict(sorted(rates.items(), key=lambda item: -item[1]))
    with report.chart(size=(10, 1.6 + 0.9 * len(rates))) as (_, axes):
        labels = [f"{rate:.0f}   {figures[name]['format']}" for name, rate in rates.items()]
        chart.rows(axes, rates, labels, [CONTINUOUS if name == OURS else MUTED for name in rates])
        axes.set_xlim(0, 1.6 * max(rates.values()))
        axes.set_xlabel("output tokens/s, same weights and workload, same machine, taking turns")
        axes.set_title("Our engine beside others")
