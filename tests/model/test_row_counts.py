"""Row counts: what the probe keeps, and that it can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model.cpu.backend import CpuLinear
from model.row_counts import CANDIDATES, RowCounts, probe_row_counts


def linear(width: int = 576, out: int = 192, *, bias: bool = False) -> CpuLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator)
    return CpuLinear(weight, torch.randn(out, generator=generator) if bias else None)


class Faulty(CpuLinear):
    """A layer whose results depend on the row count or the neighbours as `fault` says."""

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
        super().__init__(torch.eye(8), None)
        self._fault = fault

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + self._fault(x)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_product(bias: bool) -> None:
    layer = linear(bias=bias)
    weight = layer._weight.to_dense() if layer._weight.is_mkldnn else layer._weight
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.double().T
    if layer._bias is not None:
        expected += layer._bias
    assert (layer(x) - expected).abs().max() < 1e-3


def test_kept_counts_agree_bit_for_bit() -> None:
    layer = linear()
    counts = probe_row_counts([layer])
    assert counts.exact
    rows = torch.randn(counts.kept[-1], 576, generator=torch.Generator().manual_seed(2))
    expected = layer(rows)
    for count in counts.kept:
        assert torch.equal(layer(rows[-count:].contiguous()), expected[-count:])


def test_the_largest_agreeing_class_is_kept() -> None:
    odd_ones_out = Faulty(lambda x: 1e-3 if len(x) in (1, 3, 512) else 0.0)
    counts = probe_row_counts([odd_ones_out], [1, 2, 3, 4, 8, 16, 512])
    assert counts.exact
    assert counts.kept == (2, 4, 8, 16)


def test_every_layer_has_a_say() -> None:
    layers = [Faulty(lambda x: float(len(x) == 4)), Faulty(lambda x: float(len(x) == 8))]
    assert probe_row_counts(layers, [4, 8, 12, 16]).kept == (12, 16)


def tail_differs(x: torch.Tensor) -> torch.Tensor:
    """Rows beyond the last whole tile of 64 go another way, as a library's remainder kernel might."""
    whole = len(x) // 64 * 64
    return (torch.arange(len(x)) >= whole)[:, None] * 1e-3 if len(x) > 64 else torch.zeros(len(x), 1)


def test_the_tail_of_a_large_count_is_looked_at() -> None:
    assert probe_row_counts([Faulty(tail_differs)], [8, 16, 64, 96, 224, 256]).kept == (8, 16, 64, 256)


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: torch.arange(len(x))[:, None] * 1e-3,  # position
        lambda x: x.sum() * 1e-3,  # neighbours
    ],
)
def test_refuses_to_call_itself_exact(fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    counts = probe_row_counts([Faulty(fault)], [2, 4, 8])
    assert not counts.exact
    assert counts.kept == (2, 4, 8)
    assert counts.as_dict()["exact"] is False


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [(0, []), (1, [4]), (4, [4]), (5, [8]), (16, [16]), (17, [16, 4]), (40, [16, 16, 8])],
)
def test_tiles_cover_the_rows(rows: int, tiles: list[int]) -> None:
    assert RowCounts(kept=(4, 8, 16), candidates=(4, 8, 16), exact=True, seconds=0.0).tiles(rows) == tiles


def test_candidates_are_fine_for_decode() -> None:
    for rows in range(1, 129):
        assert min(c for c in CANDIDATES if c >= rows) <= max(4, rows * 9 // 8 + 3)
