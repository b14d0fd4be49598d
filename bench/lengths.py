"""Distributions of lengths in tokens, by their quantile functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Lengths(Protocol):
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
        body = self.median * np.exp(self.sigma * _normal(np.minimum(u, 1 - self.tail)))
        beyond = (self.tail / np.minimum(1 - u, self.tail)) ** (1 / self.alpha)
        return np.clip(body * beyond, self.low, self.high)


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
    """Log-normal with a given mean and coefficient of variation, cut to [1, high]."""

    mean: float
    variation: float
    high: float = math.inf

    def quantile(self, u: Floats) -> Floats:
        variance = math.log(1 + self.variation**2)
        lengths = self.mean * np.exp(math.sqrt(variance) * _normal(u) - variance / 2)
        return np.clip(lengths, 1, self.high)


def fixed(tokens: float) -> Lengths:
    return Spread(tokens, 0)


def _normal(u: Floats) -> Floats:
    return np.array([NormalDist().inv_cdf(min(max(x, 1e-9), 1 - 1e-9)) for x in u])
