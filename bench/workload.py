"""Requests to drive an engine with: seeded, heavy-tailed, the same for every side of a comparison.

A workload is a list of (arrival, prompt tokens, output length, tenant, priority). Outputs are forced
to their length (`ignore_eos`), so both sides of a comparison do identical work. Token ids are drawn
without a tokenizer: any vocabulary will do.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from bench.report import BenchError
from engine_actor.request import Request
from model.executor import SamplingParams

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
T = TypeVar("T")

FIRST_WORD = 100
"""Smaller ids are special tokens and single bytes in the usual vocabularies."""
VOCAB = 49_152
"""Of the packaged model."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload."""

    id: str
    arrival: float
    """Seconds after the start."""
    prompt: tuple[int, ...]
    output_tokens: int
    tenant: str = "default"
    priority: int = 0

    def request(self, start: float = 0.0) -> Request:
        """For a bare engine: greedy, exactly `output_tokens` long."""
        return Request(
            self.id,
            list(self.prompt),
            SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True),
            tenant=self.tenant,
            priority=self.priority,
            arrival=start + self.arrival,
        )

    def body(self, model: str) -> dict[str, object]:
        """For `POST /v1/completions`: the same, streamed."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "priority": self.priority,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """Items in order of arrival."""

    name: str
    items: tuple[Item, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_tokens for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self)} requests, {self.prompt_tokens:,} prompt + "
            f"{self.output_tokens:,} output tokens over {self.items[-1].arrival:.1f} s"
        )

    def arriving(self, rate: float | None, *, burstiness: float = 1.0, seed: int = 0) -> Workload:
        """The same requests at another pace: requests/s, or all at once when `rate` is None."""
        times = arrivals(len(self), rate, burstiness=burstiness, seed=seed)
        items = (replace(item, arrival=float(t)) for item, t in zip(self.items, times, strict=True))
        return Workload(self.name, tuple(items))

    def among(
        self, tenants: Mapping[str, float], priorities: Mapping[int, float] | None = None, *, seed: int = 0
    ) -> Workload:
        """The same requests, dealt out by each tenant's (and each priority's) share of them."""
        rng = np.random.default_rng([seed, 2])
        owners = _assign(tenants, len(self), rng)
        levels = _assign(priorities or {0: 1.0}, len(self), rng)
        dealt = zip(self.items, owners, levels, strict=True)
        return Workload(self.name, tuple(replace(i, tenant=t, priority=p) for i, t, p in dealt))


class Lengths(Protocol):
    """A distribution of lengths in tokens, by its quantile function."""

    def quantile(self, u: Floats) -> Floats: ...


@dataclass(frozen=True)
class HeavyTail:
    """Log-normal body; above its (1 - tail) quantile a Pareto tail of index `alpha`; cut to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int
    tail: float = 0.15
    alpha: float = 1.0

    def quantile(self, u: Floats) -> Floats:
        joint = 1 - self.tail
        body = self._body(np.minimum(u, joint))
        beyond = (self.tail / np.minimum(1 - u, self.tail)) ** (1 / self.alpha)
        return np.clip(body * beyond, self.low, self.high)

    def _body(self, u: Floats) -> Floats:
        z = np.array([NormalDist().inv_cdf(min(max(x, 1e-9), 1 - 1e-9)) for x in u])
        return np.asarray(self.median * np.exp(self.sigma * z), dtype=np.float64)


@dataclass(frozen=True)
class Quantiles:
    """Through published quantiles, log-linear between them: {probability: tokens}."""

    points: Mapping[float, float]
    scale: float = 1.0

    def quantile(self, u: Floats) -> Floats:
        logs = np.log([self.points[p] for p in sorted(self.points)])
        return self.scale * np.exp(np.interp(u, sorted(self.points), logs))


@dataclass(frozen=True)
class Spread:
    """Log-normal with a given mean and coefficient of variation; constant where that is 0."""

    mean: float
    variation: float
    high: int

    def quantile(self, u: Floats) -> Floats:
        variance = math.log(1 + self.variation**2)
        z = np.array([NormalDist().inv_cdf(x) for x in u])
        lengths = self.mean * np.exp(math.sqrt(variance) * z - variance / 2)
        return np.asarray(np.clip(lengths, 1, self.high), dtype=np.float64)


@dataclass(frozen=True)
class Shape:
    """What a workload is made of."""

    requests: int
    prompts: Lengths
    outputs: Lengths
    rate: float | None = None
    """Requests/s; None: all at once."""
    burstiness: float = 1.0
    """Coefficient of variation of the gaps: 1 is Poisson, more comes in bursts."""
    shared_prefix: int = 0
    """Leading prompt tokens that all requests of one tenant have in common."""
    tenants: Mapping[str, float] = field(default_factory=lambda: {"default": 1.0})
    """Share of the requests by tenant."""
    priorities: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})
    """Share of the requests by priority."""


# Azure LLM inference trace 2023, conversation (Splitwise, ISCA 2024): its published quantiles, and a
# scale at which its 99th percentiles (4,142 + 601 tokens) fit a context of 2,048.
_AZURE_SCALE = 2048 / (4142 + 601)
_AZURE_PROMPTS = Quantiles({0: 30, 0.5: 1020, 0.9: 2735, 0.99: 4142, 1: 4142}, _AZURE_SCALE)
_AZURE_OUTPUTS = Quantiles(
    {0: 20, 0.05: 41, 0.25: 85, 0.5: 129, 0.75: 395, 0.9: 424, 0.95: 451, 0.99: 601, 1: 601}, _AZURE_SCALE
)

PRESETS: dict[str, Shape] = {
    "smoke": Shape(8, HeavyTail(24, 0.6, 8, 64), HeavyTail(8, 0.8, 4, 32)),
    "default": Shape(64, HeavyTail(60, 0.7, 16, 512, tail=0.1, alpha=1.2), HeavyTail(31, 1.1, 4, 256)),
    "long-prompts": Shape(24, HeavyTail(640, 0.5, 256, 1536), HeavyTail(31, 1.1, 4, 128)),
    "azure-like": Shape(48, _AZURE_PROMPTS, _AZURE_OUTPUTS, rate=0.5),
}


def build(shape: Shape, name: str = "custom", *, seed: int = 0, vocab: int = VOCAB) -> Workload:
    """Draw a workload. Lengths are stratified: even a few requests carry the tail they should."""
    rng = np.random.default_rng(seed)
    count = shape.requests
    prompts = _lengths(shape.prompts, count, rng)
    outputs = _lengths(shape.outputs, count, rng)
    times = arrivals(count, shape.rate, burstiness=shape.burstiness, seed=seed)
    tenants = _assign(shape.tenants, count, rng)
    priorities = _assign(shape.priorities, count, rng)
    prefixes = {tenant: _tokens(shape.shared_prefix, vocab, rng) for tenant in shape.tenants}
    items = []
    for i in range(count):
        own = _tokens(int(prompts[i]), vocab, rng)
        prompt = (*prefixes[tenants[i]], *own)[: int(prompts[i])]
        items.append(Item(f"r{i:04}", float(times[i]), prompt, int(outputs[i]), tenants[i], priorities[i]))
    return Workload(name, tuple(items))


def preset(
    name: str,
    *,
    seed: int = 0,
    requests: int | None = None,
    shared_prefix: int = 0,
    vocab: int = VOCAB,
) -> Workload:
    """A named workload. Raises BenchError for an unknown name."""
    if name not in PRESETS:
        raise BenchError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    shape = PRESETS[name]
    shape = replace(shape, requests=requests or shape.requests, shared_prefix=shared_prefix)
    return build(shape, name, seed=seed, vocab=vocab)


def arrivals(count: int, rate: float | None, *, burstiness: float = 1.0, seed: int = 0) -> Floats:
    """Seconds from the start, ascending, the first at 0: gamma-distributed gaps with mean 1 / rate."""
    if rate is None:
        return np.zeros(count)
    shape = 1 / burstiness**2
    gaps = np.random.default_rng([seed, 1]).gamma(shape, 1 / (rate * shape), count)
    gaps[0] = 0
    return np.cumsum(gaps)


TRACE_COLUMNS = (
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)


def from_trace(
    path: Path,
    *,
    max_len: int,
    requests: int | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
    vocab: int = VOCAB,
) -> Workload:
    """Replay a trace in the Azure layout: seconds or a date and time, prompt tokens, output tokens.

    `time_scale` 2 plays it at half its pace. Lengths shrink by one factor at which 99 % of the
    requests fit `max_len`; the others are cut. Raises BenchError naming the line of a malformed row.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            header = tuple(next(reader, ()))
            if header not in TRACE_COLUMNS:
                expected = " or ".join(",".join(columns) for columns in TRACE_COLUMNS)
                raise BenchError(f"{path}, line 1: expected the header {expected}")
            for row in reader:
                rows.append(_trace_row(path, reader.line_num, row))
                if len(rows) == requests:
                    break
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise BenchError(f"{path}, line 2: the trace has no requests")

    rng = np.random.default_rng(seed)
    start = rows[0][0]
    shrink = min(1.0, max_len / float(np.percentile([p + o for _, p, o in rows], 99)))
    items = []
    for i, (time, prompt, output) in enumerate(rows):
        if time < start:
            raise BenchError(f"{path}, line {i + 2}: arrives before the first request")
        outputs = min(max(1, round(output * shrink)), max_len - 1)
        prompts = min(max(1, round(prompt * shrink)), max_len - outputs)
        items.append(Item(f"r{i:04}", (time - start) * time_scale, _tokens(prompts, vocab, rng), outputs))
    return Workload(path.stem, tuple(sorted(items, key=lambda item: item.arrival)))


def add_arguments(parser: argparse.ArgumentParser, *, default: str = "default") -> None:
    """The options by which every experiment's workload is chosen; `chosen` reads them."""
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


def chosen(
    args: argparse.Namespace, *, max_len: int, requests: int | None = None, vocab: int = VOCAB
) -> Workload:
    """The workload that the command line asks for; `requests` is the default for --requests."""
    count = args.requests or requests
    if args.trace:
        return from_trace(
            args.trace,
            max_len=max_len,
            requests=count,
            time_scale=args.time_scale,
            seed=args.seed,
            vocab=vocab,
        )
    return preset(args.preset, seed=args.seed, requests=count, shared_prefix=args.shared_prefix, vocab=vocab)


def _trace_row(path: Path, line: int, row: Sequence[str]) -> tuple[float, int, int]:
    try:
        time, prompt, output = row
        seconds = float(time) if _is_number(time) else np.datetime64(time).astype("M8[us]").astype(int) / 1e6
        if not (math.isfinite(seconds) and int(prompt) > 0 and int(output) > 0):
            raise ValueError
        return float(seconds), int(prompt), int(output)
    except ValueError:
        raise BenchError(
            f"{path}, line {line}: expected time,prompt tokens,output tokens (both at least 1), "
            f"got {','.join(row)!r}"
        ) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> Ints:
    strata = (rng.permutation(count) + rng.random(count)) / count
    return np.maximum(1, np.rint(lengths.quantile(strata))).astype(np.int64)


def _tokens(count: int, vocab: int, rng: np.random.Generator) -> tuple[int, ...]:
    # Log-uniform ids: in a BPE vocabulary low ids are frequent tokens, so this is close to Zipf's law.
    draws = rng.uniform(math.log(min(FIRST_WORD, vocab - 1)), math.log(vocab), count)
    return tuple(np.exp(draws).astype(int).tolist())


def _assign(shares: Mapping[T, float], count: int, rng: np.random.Generator) -> list[T]:
    names = list(shares)
    weights = np.array([shares[name] for name in names], dtype=float)
    picks = rng.choice(len(names), count, p=weights / weights.sum())
    return [names[i] for i in picks]
