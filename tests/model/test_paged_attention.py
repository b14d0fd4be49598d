"""Slots as pages: which rows attend together, what the kernel is asked, and plain attention in its place."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from model.backend import HeadLayout, Rope
from model.cuda import CudaBackend
from model.paged_attention import LONG_RUNS, PAGE, PagedAttention, Runs, plain_varlen_attn

LAYOUT = HeadLayout(n_head=4, n_kv_head=2, head_dim=16, norm_eps=1e-6)
FREQUENCIES = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005])

Run = tuple[int, int, int]
"""Slot, first position, rows."""


def columns(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    positions = np.concatenate([np.arange(first, first + rows) for _, first, rows in runs])
    slots = np.concatenate([np.full(rows, slot) for slot, _, rows in runs])
    return positions.astype(np.int64), slots.astype(np.int64)


def strict_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Demands what torch 2.13's FlashAttention 2 (flash_api.cpp) demands of a call with pages."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    call.apply_defaults()
    a = call.arguments
    q, k, v, bounds, table, used = (
        a[name] for name in ("query", "key", "value", "cu_seq_q", "block_table", "seqused_k")
    )
    sequences = len(bounds) - 1
    pages, page, heads, size = k.shape
    for ints in (bounds, a["cu_seq_k"], used):
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    assert bounds.shape == a["cu_seq_k"].shape == (sequences + 1,)
    assert used.shape == (sequences,)
    assert table.dtype == torch.int32
    assert table.shape == (sequences, 1)
    assert table.stride(-1) == 1
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape == (pages, page, heads, size)
    assert q.shape[1:] == (q.shape[1], size)
    assert page % 256 == 0
    assert page == a["max_k"]
    assert size % 8 == 0
    assert size <= 256
    assert a["num_splits"] == 1
    assert a["enable_gqa"] == (q.shape[1] != heads)
    # One row a sequence and no causal mask: so the heads of a group share their keys.
    assert a["window_size"] == ((-1, -1) if a["max_q"] == 1 else (-1, 0))
    assert sequences == len(q) if a["max_q"] == 1 else a["max_q"] == len(q)
    assert a["return_aux"] is None
    lengths = bounds.diff()
    assert bounds[0] == 0
    assert 0 <= lengths.min() <= lengths.max() <= a["max_q"]
    assert bounds[-1] <= len(q)
    assert 0 <= used.min() <= used.max() <= page
    assert ((used == 0) | (used >= lengths)).all()
    assert 0 <= table.min() <= table.max() < pages
    # It does not write rows that are in no sequence.
    assert bounds[-1] == len(q)
    return plain_varlen_attn(*args, **kwargs)


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 0, 1)],
        [(0, 0, 5)],
        [(2, 7, 1), (0, 3, 1), (1, 200, 1)],
        [(2, 7, 1), (0, 3, 9), (1, 20, 2), (3, 40, 1)],
        [(slot, slot, 1 + slot % 4) for slot in range(3 * LONG_RUNS)],
    ],
)
def test_every_row_sees_its_slot_up_to_itself(runs: list[Run]) -> None:
    backend = CudaBackend(torch.device("cpu"), torch.float32)
    kv = backend.storage(n_layer=1, num_slots=60, n_kv_head=2, max_len=300, head_dim=16, poison=True)
    generator = torch.Generator().manual_seed(1)
    for slot, first, rows in runs:
        kv.keys[0, slot, :first] = torch.randn(first, 2, 16, generator=generator)
        kv.values[0, slot, :first] = torch.randn(first, 2, 16, generator=generator)
        # Whatever is beyond must not be seen.
        kv.keys[0, slot, first + rows :] = kv.values[0, slot, first + rows :] = math.nan
    positions, slots = columns(runs)
    qkv = torch.randn(len(positions), 8 * 16, generator=generator)
    rope = Rope(FREQUENCIES, 512, "cpu")
    attention = PagedAttention(LAYOUT, rope, strict_kernel)
    attention.begin(positions, slots, kv)
    found = attention(0, qkv.clone(), None, None)
    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        query = attention._head(qkv.view(-1, 8, 16), None)[row, :4]
        keys, values = (part[0, slot, : position + 1].transpose(0, 1) for part in (kv.keys, kv.values))
        expected = F.scaled_dot_product_attention(query[:, None], keys, values, enable_gqa=True)
        assert torch.allclose(found[row], expected.flatten(), atol=1e-5)


def test_alone_and_in_a_run_a_row_has_the_same_bits() -> None:
    backend = CudaBackend(torch.device("cpu"), torch.float32)
    qkv = torch.randn(40, 8 * 16, generator=torch.Generator().manual_seed(2))
    attention = PagedAttention(LAYOUT, Rope(FREQUENCIES, 512, "cpu"), strict_kernel)
    outputs = []
    for cuts in ([0, 40], [0, 1, 17, 18, 39, 40], [*range(41)]):
        kv = backend.storage(n_layer=1, num_slots=2, n_kv_head=2, max_len=40, head_dim=16)
        parts = []
        for start, end in pairwise(cuts):
            attention.begin(*columns([(1, start, end - start)]), kv)
            parts.append(attention(0, qkv[start:end].clone(), None, None))
        outputs.append(torch.cat(parts))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_longest_runs_have_places_and_the_rest_go_row_by_row() -> None:
    runs = Runs.of(*columns([(slot, 5, 1 + slot) for slot in range(LONG_RUNS + 4)]))
    together = {int(keys) - 5 for keys in runs.run_keys if keys}
    assert together == set(range(5, LONG_RUNS + 5))
    assert (runs.keys == 0).sum() == runs.long.sum() == sum(together)
    assert runs.bounds[-1] == len(runs.keys)


def test_a_page_holds_a_slot() -> None:
    backend = CudaBackend(torch.device("cpu"), torch.float32)
    kv = backend.storage(n_layer=2, num_slots=3, n_kv_head=2, max_len=PAGE + 1, head_dim=16)
    assert kv.keys.shape == kv.values.shape == (2, 4, 2 * PAGE, 2, 16)
    assert kv.max_len == PAGE + 1
