"""Samples and what they say: percentiles, sides that take turns, and the pairs these make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
CONFIDENCE = 0.95


def percentiles(values: Sequence[float]) -> dict[str, Any]:
    """p50, p95 and p99 (linear between neighbours), with mean and max beside them; None where empty."""
    if not values:
        return dict.fromkeys(("p50", "p95", "p99", "mean", "max"))
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    found = {"p50": p50, "p95": p95, "p99": p99, "mean": np.mean(values), "max": max(values)}
    return {name: float(value) for name, value in found.items()}


def mean_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the turns; None where a turn has none."""
    columns = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {name: None if None in found else sum(found) / len(found) for name, found in columns.items()}


def in_turns(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    at_most: int = 0,
    settled: Callable[[dict[str, list[T]]], bool] = lambda _: True,
) -> dict[str, list[T]]:
    """What each side gives, a round after another: a machine's pace drifts, so that only neighbours compare.

    Every other round runs backwards. After `rounds` it goes on until the turns are `settled`, for
    `at_most` rounds in all.
    """
    turns: dict[str, list[T]] = {name: [] for name in sides}
    done = 0
    while done < rounds or (done < at_most and not settled(turns)):
        for name in list(sides)[:: -1 if done % 2 else 1]:
            turns[name].append(sides[name]())
        done += 1
    return turns


@dataclass(frozen=True)
class Pairs:
    """One figure from each pair of turns, such as a ratio."""

    values: list[float]

    @classmethod
    def ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> Pairs:
        return cls([one / other for one, other in zip(ours, theirs, strict=True)])

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median of all pairs that could be lies, with at least CONFIDENCE.

        From the pairs' own order, whatever their distribution; without bounds while they are too few.
        """
        ordered, count = [-math.inf, *sorted(self.values), math.inf], len(self.values)
        cut, outside = 0, 2 / 2**count
        while outside <= 1 - CONFIDENCE:
            cut += 1
            outside += 2 * math.comb(count, cut) / 2**count
        return ordered[cut], ordered[-1 - cut]

    def clear_of(self, bound: float) -> bool:
        """The interval lies on one side of the bound: more pairs would hardly change the verdict."""
        low, high = self.interval
        return not low < bound < high

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.median:.3f}, the median of {len(self.values)} pairs ({low:.3f} to {high:.3f})"
