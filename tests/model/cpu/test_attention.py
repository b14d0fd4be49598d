"""The CPU attention kernel: against plain torch, and bit for bit against itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numba
import numpy as np
import pytest
import torch

from model.backend import HeadLayout, Rope
from model.cpu.attention import CpuAttention, plan_items
from model.cpu.backend import CpuBackend
from model.cpu.jit import LANES
from model.storage import SlotStorage

CONTEXT = 160


@dataclass(frozen=True)
class Case:
    layout: HeadLayout
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    rope: Rope

    def kv(self, slots: int) -> SlotStorage:
        return CpuBackend().storage(
            n_layer=1,
            num_slots=slots,
            n_kv_head=self.layout.n_kv_head,
            max_len=CONTEXT,
            head_dim=self.layout.head_dim,
            poison=True,
        )

    def rows(self, count: int, seed: int) -> torch.Tensor:
        width = (self.layout.n_head + 2 * self.layout.n_kv_head) * self.layout.head_dim
        return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def case(n_head: int, n_kv_head: int, head_dim: int, *, normed: bool = False) -> Case:
    generator = torch.Generator().manual_seed(5)
    norms = tuple(torch.rand(head_dim, generator=generator) + 0.5 if normed else None for _ in range(2))
    frequencies = 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return Case(
        HeadLayout(n_head, n_kv_head, head_dim, 1e-6),
        (norms[0], norms[1]),
        Rope(frequencies, CONTEXT, "cpu"),
    )


CASES = {
    "grouped": case(9, 3, 64),
    "one-to-one": case(2, 2, 32),
    "odd-width": case(4, 2, 10, normed=True),
    "wide-group": case(28, 1, 16),
    "five-share": case(5, 1, 128, normed=True),
}


def attend(case: Case, storage: SlotStorage, runs: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """Outputs of the rows of runs of (slot, first position, q k v rows)."""
    positions = np.concatenate([np.arange(first, first + len(rows)) for _, first, rows in runs])
    slots = np.concatenate([np.full(len(rows), slot) for slot, _, rows in runs])
    attention = CpuAttention(case.layout, case.rope)
    attention.begin(positions, slots, storage)
    return attention(0, torch.cat([rows for _, _, rows in runs]), *case.norms)


def reference(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Causal attention over one whole sequence, in float64."""
    layout = case.layout
    heads = rows.double().view(len(rows), -1, layout.head_dim)
    q, k, v = torch.split(heads, [layout.n_head, layout.n_kv_head, layout.n_kv_head], dim=1)

    def rotate(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + layout.norm_eps).rsqrt() * norm
        cos = case.rope.cos[: len(rows)].double().repeat(1, 2).unsqueeze(1)
        sin = case.rope.sin[: len(rows)].double().repeat(1, 2).unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    share = layout.n_head // layout.n_kv_head
    k, v = (x.repeat_interleave(share, dim=1).transpose(0, 1) for x in (rotate(k, case.norms[1]), v))
    scores = rotate(q, case.norms[0]).transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(layout.head_dim)
    future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return out.transpose(0, 1).reshape(len(rows), -1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, LANES, LANES + 1, 131])
def test_equals_plain_attention(case: Case, length: int) -> None:
    rows = case.rows(length, seed=length)
    found = attend(case, case.kv(1), [(0, 0, rows.clone())])
    assert (found - reference(case, rows)).abs().max() < 5e-6


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_no_bit_depends_on_the_number_of_threads(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["grouped"]
    runs = [(slot, 0, case.rows(length, seed=slot)) for slot, length in enumerate([70, 1, 5, 40])]
    expected = attend(case, case.kv(4), [(slot, first, rows.clone()) for slot, first, rows in runs])
    monkeypatch.setattr(numba, "get_num_threads", lambda: workers)
    assert torch.equal(attend(case, case.kv(4), runs), expected)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_work_is_shared_out_whole_and_evenly(workers: int) -> None:
    positions, slots = np.r_[np.arange(1000), np.full(8, 500)], np.r_[np.full(1000, 9), np.arange(8)]
    items, bounds = plan_items(positions, slots, 3, 3, workers)
    assert items[:, 1].sum() == len(positions)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 3 * len(items), workers + 1)
    costs = np.repeat(items[:, 1] * (items[:, 2] + items[:, 1]), 3)
    shares = [costs[a:b].sum() for a, b in pairwise(bounds)]
    assert max(shares) < 1.2 * sum(shares) / workers


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_bit_depends_on_chunks_company_or_leftovers(case: Case) -> None:
    rng = np.random.default_rng(11)
    sequences = [case.rows(int(length), seed=i) for i, length in enumerate([1, 16, 33, 64, 127])]
    kv = case.kv(len(sequences))
    for slot in range(len(sequences)):
        kv.forget(slot)  # every position of every slot is NaN now
    alone = [attend(case, case.kv(1), [(0, 0, rows.clone())]) for rows in sequences]
    done = [0] * len(sequences)
    mixed: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(rows) for d, rows in zip(done, sequences, strict=True)):
        runs = []
        for i in rng.permutation(len(sequences)):
            chunk = min(len(sequences[i]) - done[i], int(rng.choice([1, 2, 9, 30])))
            if chunk:
                runs.append((int(i), done[i], sequences[i][done[i] : done[i] + chunk].clone()))
        out = attend(case, kv, runs)
        for (i, _, rows), part in zip(runs, torch.split(out, [len(r) for _, _, r in runs]), strict=True):
            mixed[i].append(part)
            done[i] += len(rows)
    for expected, parts in zip(alone, mixed, strict=True):
        assert torch.equal(expected.view(torch.int32), torch.cat(parts).view(torch.int32))


def test_a_later_row_reaches_no_earlier_one() -> None:
    case = CASES["grouped"]
    rows = case.rows(20, seed=1)
    expected = attend(case, case.kv(1), [(0, 0, rows.clone())])
    rows[17:] = math.nan
    found = attend(case, case.kv(1), [(0, 0, rows.clone())])
    assert torch.equal(found[:17], expected[:17])
    assert found[17:].isnan().all()


def test_large_scores_stay_finite() -> None:
    case = CASES["grouped"]
    rows = case.rows(40, seed=2) * 100
    found = attend(case, case.kv(1), [(0, 0, rows.clone())])
    assert (found - reference(case, rows)).abs().max() < 1e-2
