"""Requests to drive an engine with: seeded, heavy-tailed, the same for every side of a comparison.

A workload is a list of (arrival, prompt tokens, output length, tenant, priority). Outputs are forced
to their length (`ignore_eos`), so both sides of a comparison do identical work. Token ids are drawn
without a tokenizer: any vocabulary will do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bench.lengths import Floats, HeavyTail, Lengths, Quantiles
from bench.report import BenchError
from engine_actor.request import Request
from model.executor import SamplingParams

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
    prefixes = {tenant: random_tokens(shape.shared_prefix, vocab, rng) for tenant in shape.tenants}
    items = []
    for i in range(count):
        own = random_tokens(int(prompts[i]), vocab, rng)
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


def _lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> Ints:
    strata = (rng.permutation(count) + rng.random(count)) / count
    return np.maximum(1, np.rint(lengths.quantile(strata))).astype(np.int64)


def random_tokens(count: int, vocab: int, rng: np.random.Generator) -> tuple[int, ...]:
    # Log-uniform ids: in a BPE vocabulary low ids are frequent tokens, so this is close to Zipf's law.
    draws = rng.uniform(math.log(min(FIRST_WORD, vocab - 1)), math.log(vocab), count)
    return tuple(np.exp(draws).astype(int).tolist())


def _assign(shares: Mapping[T, float], count: int, rng: np.random.Generator) -> list[T]:
    names = list(shares)
    weights = np.array([shares[name] for name in names], dtype=float)
    picks = rng.choice(len(names), count, p=weights / weights.sum())
    return [names[i] for i in picks]
