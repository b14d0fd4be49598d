"""Options that experiments share: the engine under test, and the workload it gets."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.replay import from_trace
from bench.workload import PRESETS, VOCAB, Workload, preset


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory (default: packaged)")


def add_engine(parser: argparse.ArgumentParser, *, max_len: int = 2048) -> None:
    add_model(parser)
    parser.add_argument("--slots", type=int, default=16, help="requests that run at once (default: 16)")
    parser.add_argument("--max-len", type=int, default=max_len, help=f"tokens a slot holds ({max_len})")


def add_workload(parser: argparse.ArgumentParser, *, default: str = "default") -> None:
    """`workload` reads them."""
    parser.add_argument("--preset", default=default, help=f"one of {', '.join(PRESETS)} (default: {default})")
    parser.add_argument("--trace", type=Path, metavar="FILE.csv", help="replay a trace in the Azure layout")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretch the trace's time by this")
    parser.add_argument("--requests", type=int, help="how many requests (default: the preset's own)")
    parser.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="leading tokens that all prompts of the preset have in common (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0)


def workload(
    args: argparse.Namespace, *, max_len: int, requests: int | None = None, vocab: int = VOCAB
) -> Workload:
    """The workload that the command line asks for; `requests` is the default for --requests."""
    count, seed = args.requests or requests, args.seed
    if args.trace:
        scale = args.time_scale
        return from_trace(
            args.trace, max_len=max_len, requests=count, time_scale=scale, seed=seed, vocab=vocab
        )
    return preset(args.preset, seed=seed, requests=count, shared_prefix=args.shared_prefix, vocab=vocab)
