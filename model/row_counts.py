"""The row counts at which a library's matrix products give bit-identical rows.

A matrix product may add up a row differently depending on how many rows share the call: the
library picks another kernel or another blocking. Which counts agree is the library's and the
machine's business, so it is measured on the loaded weights at start-up, never assumed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model.backend import Linear

CANDIDATES = (*range(4, 128, 4), *range(128, 256, 8), *range(256, 513, 32))
"""Row counts tried: a step pays for every row that it is padded with, and the fewer rows the more that is of
it. Less than four take no less time."""
PROBE_ROWS = 32
"""Rows whose bits are compared between counts."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Row counts that may be used, ascending, and what the probe found."""

    kept: tuple[int, ...]
    candidates: tuple[int, ...]
    exact: bool
    """Whether a row's bits are the same at every kept count, position and neighbourhood."""
    seconds: float

    def tiles(self, rows: int) -> list[int]:
        """Row counts that cover `rows`: the largest count repeated, then the next that fits."""
        whole, rest = divmod(rows, self.kept[-1])
        tiles = [self.kept[-1]] * whole
        if rest:
            tiles.append(next(count for count in self.kept if count >= rest))
        return tiles

    def as_dict(self) -> dict[str, object]:
        """For JSON: candidates, kept, exact, seconds."""
        return {
            "candidates": list(self.candidates),
            "kept": list(self.kept),
            "exact": self.exact,
            "seconds": round(self.seconds, 3),
        }


def probe_row_counts(
    layers: Sequence[Linear],
    candidates: Sequence[int] = CANDIDATES,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> RowCounts:
    """Find the largest set of row counts at which every layer gives bit-identical rows.

    Runs the layers on seeded random rows. At each count the rows stand at several positions beside
    different neighbours; a count whose own results differ between those is dropped, and among the
    rest the largest class with equal bits is kept. Where there is none, all candidates stay usable
    but the result is not exact.
    """
    start = time.perf_counter()
    classes: dict[tuple[bytes, ...], list[int]] = {}
    for count in sorted(candidates):
        results = [_rows_at(layer, count, device, dtype) for layer in layers]
        if all(result is not None for result in results):
            classes.setdefault(tuple(result for result in results if result is not None), []).append(count)
    kept = max(classes.values(), key=lambda counts: (len(counts), counts[-1]), default=[])
    return RowCounts(
        kept=tuple(kept or sorted(candidates)),
        candidates=tuple(sorted(candidates)),
        exact=bool(kept),
        seconds=time.perf_counter() - start,
    )


def _rows_at(layer: Linear, count: int, device: torch.device | str, dtype: torch.dtype) -> bytes | None:
    """The probe rows' results at this count; None if they depend on position or neighbours."""
    rows = np.random.default_rng(0).standard_normal((max(PROBE_ROWS, count), layer.in_features), np.float32)
    x = torch.from_numpy(rows).to(device, dtype)
    found: torch.Tensor | None = None
    for shift in (0, count // 2 | 1):
        shifted = x.roll(shift, dims=0)
        y = torch.cat([layer(part) for part in _windows(shifted, count)])[: len(x)]
        # All rows are compared within a count, the tail of a window included, where kernels differ.
        y = y.roll(-shift, dims=0).view(torch.uint8)
        if found is not None and not torch.equal(found, y):
            return None
        found = y
    assert found is not None
    return found[:PROBE_ROWS].cpu().numpy().tobytes()


def _windows(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`x` cut into windows of `count` rows; the last is filled up from the front."""
    short = -len(x) % count
    return list(torch.split(torch.cat([x, x[:short]]), count))
