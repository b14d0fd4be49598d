"""Attention over slots as pages: FlashAttention where the device has it, plain torch where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from model.backend import HeadLayout, Rope
from model.batch import IntArray
from model.storage import SlotStorage

PAGE = 256
"""FlashAttention's pages, one per slot here, come in multiples of this many positions."""
LONG_RUNS = 16
"""Runs of rows of one slot that are attended to as runs; the rows of others one by one, with the same bits.

A kernel with a place for each run that may come costs time for each that does not.
"""
RUN_PLACES = 2 * LONG_RUNS + 1
"""The rows between them are runs without keys."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Runs:
    """How a forward's rows attend: those of a few long runs together, all others alone."""

    keys: Int32Array
    """[rows] keys that a row sees that is attended to alone; 0 for a row of a long run."""
    long: npt.NDArray[np.bool_]
    """[rows] whether a row is one of a long run."""
    bounds: Int32Array
    """[RUN_PLACES + 1] where each run begins and the last ends."""
    run_keys: Int32Array
    """[RUN_PLACES] keys that a run's last row sees; 0 for rows between long runs."""
    run_slots: Int32Array
    """[RUN_PLACES]"""

    @classmethod
    def of(cls, positions: IntArray, slots: IntArray) -> Runs:
        """The runs of rows at these positions of these slots: both [rows], see Batch."""
        rows = len(slots)
        broken = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
        starts = np.flatnonzero(np.r_[True, broken])
        lengths = np.diff(np.r_[starts, rows])
        longest = np.argsort(-lengths, kind="stable")[:LONG_RUNS]
        longest = np.sort(longest[lengths[longest] > 1])
        bounds = np.full(RUN_PLACES + 1, rows, np.int32)
        run_keys, run_slots = np.zeros((2, RUN_PLACES), np.int32)
        long = np.zeros(rows, np.bool_)
        bounds[0] = 0
        for place, run in enumerate(longest):
            start, end = starts[run], starts[run] + lengths[run]
            bounds[2 * place + 1 : 2 * place + 3] = start, end
            run_keys[2 * place + 1] = positions[end - 1] + 1
            run_slots[2 * place + 1] = slots[start]
            long[start:end] = True
        keys = np.where(long, 0, positions + 1).astype(np.int32)
        return cls(keys, long, bounds, run_keys, run_slots)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows and their runs on the device."""

    positions: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    long: torch.Tensor | None
    """See Runs; None: there is no long run, and what follows is not read."""
    bounds: torch.Tensor
    run_keys: torch.Tensor
    run_slots: torch.Tensor


VarlenKernel = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""`torch.nn.attention.varlen.varlen_attn`, or what stands in for it."""


class PagedAttention:
    """See Attention. A slot is one page and so is read in place.

    What torch 2.13's FlashAttention 2 makes of the arguments, by its source: `num_splits=1` picks one block
    of keys for every mask and row count, so that a row's sum is the same alone and in a run (left to choose,
    it may split a sequence's keys by who else is there, and with pages has returned NaN:
    pytorch/torchtitan#3235, pytorch/pytorch#194167). A query of one row must come without a causal mask to
    share its keys between the heads of a group. With pages `cu_seq_k` is demanded and not read.
    """

    def __init__(self, layout: HeadLayout, rope: Rope, kernel: VarlenKernel) -> None:
        self._layout = layout
        self._rope = rope
        self._kernel = kernel

    def begin(self, positions: IntArray, slots: IntArray, storage: SlotStorage) -> None:
        """See Attention."""
        device = storage.keys.device
        runs = Runs.of(positions, slots)
        columns = (positions, slots, runs.keys, runs.long, runs.bounds, runs.run_keys, runs.run_slots)
        rows = DeviceRows(*(torch.from_numpy(column).to(device) for column in columns))
        self.attend(rows if runs.long.any() else replace(rows, long=None), storage)

    def attend(self, rows: DeviceRows, storage: SlotStorage) -> None:
        """The same for rows that are on the device."""
        self._storage = storage
        self._rows = rows
        self._alone = torch.arange(len(rows.slots) + 1, dtype=torch.int32, device=rows.slots.device)
        self._tables = rows.slots.int().unsqueeze(1), rows.run_slots.unsqueeze(1)
        self._cos = self._rope.cos[rows.positions].unsqueeze(1)
        self._sin = self._rope.sin[rows.positions].unsqueeze(1)

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attention."""
        layout, rows = self._layout, self._rows
        heads = [layout.n_head, layout.n_kv_head, layout.n_kv_head]
        q, k, v = torch.split(qkv.view(len(qkv), -1, layout.head_dim), heads, dim=1)
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        keys[rows.slots, rows.positions] = self._head(k, k_norm)
        values[rows.slots, rows.positions] = v
        q = self._head(q, q_norm)
        out = self._run(q, keys, values, self._alone, 1, rows.keys, self._tables[0])
        if rows.long is not None:
            long = self._run(q, keys, values, rows.bounds, len(q), rows.run_keys, self._tables[1])
            out = torch.where(rows.long[:, None, None], long, out)
        return out.reshape(len(qkv), -1)

    def _run(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: torch.Tensor,
        longest: int,
        used: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        out = self._kernel(
            q,
            keys,
            values,
            bounds,
            bounds,
            longest,
            keys.shape[1],
            scale=1.0 / math.sqrt(self._layout.head_dim),
            window_size=(-1, -1) if longest == 1 else (-1, 0),
            enable_gqa=self._layout.n_head != self._layout.n_kv_head,
            seqused_k=used,
            block_table=table,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _head(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Normalise and rotate heads: [rows, heads, head_dim], rotated in fp32."""
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, self._layout.norm_eps)
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self._cos - second * self._sin, second * self._cos + first * self._sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What `varlen_attn` computes with pages and a causal mask, row by row in fp32, on any device.

    It gathers a copy of every row's keys, so it is for small batches and for tests. query: [rows, heads,
    head_dim]; key, value: [slots, page, heads, head_dim].
    """
    row = torch.arange(len(query), device=query.device, dtype=torch.int32)
    run = torch.searchsorted(cu_seq_q[1:].contiguous(), row, right=True).clamp(max=len(seqused_k) - 1)
    last = seqused_k[run] - (cu_seq_q[run + 1] - row)
    seen = torch.arange(key.shape[1], device=query.device) <= last[:, None]
    slot = block_table[run, 0].long()
    q = query.view(len(query), key.shape[2], -1, query.shape[2]).float()
    scores = torch.einsum("rhgd,rlhd->rhgl", q, key[slot].float()) * scale
    weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    # Beyond the last key there is whatever was there; and a row may see no key at all.
    weights = weights.masked_fill(~seen[:, None, None], 0.0)
    values = value[slot].masked_fill(~seen[:, :, None, None], 0.0).float()
    return torch.einsum("rhgl,rlhd->rhgd", weights, values).reshape(query.shape).to(query.dtype)
