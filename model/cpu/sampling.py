"""Kernels that draw tokens from logits, row by row."""

from __future__ import annotations

import numpy as np
from numba import prange

from model.cpu.jit import F32, F64, I64, LANES, combine, exp, kernel, parallel_kernel

ONE_HIGH = 0x3F80
"""The leading 16 bits of 1.0f, the largest weight a token can have."""


@kernel
def _cut(
    weights: F32, floor: float, most: int, mass: float, counts: I64, masses: F64
) -> tuple[float, int, float]:
    """Where the descending order of the weights >= floor (ties: lower index first) ends.

    It ends after `most` weights, or as soon as their sum reaches `mass`. Returns the last weight
    taken, its index, and the sum. Sorting the whole row is avoided: weights in (0, 1] are counted by
    their leading 16 bits, which order as they do, and only the bin where the end falls is sorted.
    """
    bits = weights.view(np.int32)
    counts[:] = 0
    masses[:] = 0.0
    for i in range(len(weights)):
        if weights[i] >= floor and weights[i] > 0:
            high = bits[i] >> 16
            counts[high] += 1
            masses[high] += weights[i]
    taken, total = 0, 0.0
    high = len(counts) - 1
    while high > 0 and taken + counts[high] < most and total + masses[high] < mass:
        taken += counts[high]
        total += masses[high]
        high -= 1
    members = np.empty(counts[high], np.int64)
    n = 0
    for i in range(len(weights)):
        if weights[i] >= floor and weights[i] > 0 and bits[i] >> 16 == high:
            members[n] = i
            n += 1
    weight, last = floor, len(weights)
    for m in np.argsort(-weights[members], kind="mergesort"):
        taken += 1
        weight, last = weights[members[m]], members[m]
        total += weight
        if taken >= most or total >= mass:
            break
    return weight, last, total


@kernel
def _choose(row: F32, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Draw from one row of logits, which is overwritten: filter, then invert the distribution."""
    best = int(np.argmax(row))
    if temperature == 0.0:
        return best
    top = row[best]
    for i in range(len(row)):
        row[i] = exp((row[i] - top) / temperature)
    floor, last = np.float32(min_p), len(row)
    if 0 < top_k < len(row) or top_p < 1.0:
        counts, masses = np.empty(ONE_HIGH + 1, np.int64), np.empty(ONE_HIGH + 1, np.float64)
        most = top_k if top_k > 0 else len(row)
        floor, last, total = _cut(row, floor, most, np.inf, counts, masses)
        if top_p < 1.0:
            floor, last, total = _cut(row, floor, most, total * top_p, counts, masses)
    total = 0.0
    for i in range(len(row)):
        if row[i] < floor or (row[i] == floor and i > last):
            row[i] = 0
        total += row[i]
    target, reached = uniform * total, 0.0
    for i in range(len(row)):
        reached += row[i]
        if reached > target:
            return i
    return best


@parallel_kernel
def choose_tokens(
    rows: F32, temperature: F32, top_k: I64, top_p: F64, min_p: F64, uniform: F64, tokens: I64
) -> None:
    """Draw one token per row. rows: [n, vocab], overwritten; the rest: [n]; tokens: [n], written."""
    for i in prange(len(rows)):
        tokens[i] = _choose(rows[i], temperature[i], top_k[i], top_p[i], min_p[i], uniform[i])


@parallel_kernel
def log_normalisers(rows: F32, out: F64) -> None:
    """out[i] = log of the sum of exp(rows[i]). rows: [n, vocab]."""
    for i in prange(len(rows)):
        row = rows[i]
        top = row[np.argmax(row)]
        lanes = np.zeros(LANES, np.float64)
        whole = len(row) // LANES * LANES
        for at in range(0, whole, LANES):
            for j in range(LANES):
                lanes[j] += exp(row[at + j] - top)
        for j in range(len(row) - whole):
            lanes[j] += exp(row[whole + j] - top)
        out[i] = top + np.log(combine(lanes))
