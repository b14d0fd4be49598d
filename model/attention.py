"""Attention over slot KV: each row sees the keys 0..position of its own slot, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numba
import numpy as np
import torch
import torch.nn.functional as F

from model import kernels

if TYPE_CHECKING:
    from model.batch import IntArray
    from model.slot_kv import SlotKV


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a row of the fused q, k, v projection is cut into heads."""

    n_head: int
    n_kv_head: int
    head_dim: int
    norm_eps: float


class Rope:
    """Tables of the rotary embedding: cos, sin: [context, head_dim / 2], fp32."""

    def __init__(self, inverse_frequencies: torch.Tensor, context: int, device: torch.device | str) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse_frequencies)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)


class Attention(Protocol):
    """Attention of one forward's rows; `begin` is called once, then the object per layer."""

    def begin(self, positions: IntArray, slots: IntArray, kv: SlotKV) -> None:
        """Take the rows of a forward."""
        ...

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Store the rows' keys and values, and attend.

        qkv: [rows, (n_head + 2 n_kv_head) head_dim], which may be overwritten; q_norm, k_norm:
        [head_dim] or None. Returns [rows, n_head head_dim].
        """
        ...


class CpuAttention:
    """The numba kernel: exact in every mix because each query row has its own fixed order."""

    def __init__(self, layout: HeadLayout, rope: Rope) -> None:
        self._layout = layout
        self._cos, self._sin = rope.cos.numpy(), rope.sin.numpy()
        self._scale = np.float32(1.0 / math.sqrt(layout.head_dim))
        self._eps = np.float32(layout.norm_eps)
        self._no_norm = np.empty(0, np.float32)
        self._scores = np.empty((0, 0, 0), np.float32)

    def begin(self, positions: IntArray, slots: IntArray, kv: SlotKV) -> None:
        """Cut the rows into work items; scratch grows with the longest sequence."""
        heads, group = self._layout.n_kv_head, self._layout.n_head // self._layout.n_kv_head
        workers = numba.get_num_threads()
        self._positions, self._slots = positions, slots
        self._keys, self._values = kv.keys.numpy(), kv.values.numpy()
        self._items, self._bounds = kernels.plan_items(positions, slots, group, heads, workers)
        queries = max(kernels.ITEM_QUERIES, group)
        self._q = np.empty((heads, len(positions), group, self._layout.head_dim), np.float32)
        self._sums = np.empty((workers, queries, self._values.shape[-1]), np.float32)
        # A stride of whole pages would send every query's scores to the same cache set.
        step = math.ceil((positions.max() + 1) / kernels.LANES) * kernels.LANES + kernels.LANES
        if self._scores.shape[0] != workers or self._scores.shape[2] < step:
            self._scores = np.empty((workers, queries, step), np.float32)

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attention."""
        out = torch.empty(qkv.shape[0], self._layout.n_head * self._layout.head_dim)
        kernels.attend(
            qkv.numpy(),
            self._no_norm if q_norm is None else q_norm.numpy(),
            self._no_norm if k_norm is None else k_norm.numpy(),
            self._eps,
            self._cos,
            self._sin,
            self._scale,
            self._positions,
            self._slots,
            self._items,
            self._bounds,
            self._keys[layer],
            self._values[layer],
            self._q,
            self._scores,
            self._sums,
            out.numpy(),
        )
        return out


class CudaAttention:
    """FlashAttention over pages, where a slot is one page and so is read in place.

    `num_splits=1` keeps one order of keys per query row whatever the batch (torch documents the
    result as bitwise independent of it).
    """

    def __init__(self, layout: HeadLayout, rope: Rope) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn = varlen_attn
        self._layout = layout
        self._rope = rope

    def begin(self, positions: IntArray, slots: IntArray, kv: SlotKV) -> None:
        """Copy to the device where each run of rows begins, its slot, and its length."""
        device = kv.keys.device
        starts = np.flatnonzero(
            np.r_[True, (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)]
        )
        ends = np.r_[starts[1:], len(slots)]
        self._kv = kv
        self._longest_run = int((ends - starts).max())
        self._longest = int(positions.max()) + 1
        self._run_bounds = torch.from_numpy(np.r_[starts, len(slots)]).to(device, torch.int32)
        self._lengths = torch.from_numpy(positions[ends - 1] + 1).to(device, torch.int32)
        self._block_table = torch.from_numpy(slots[starts]).to(device, torch.int32).unsqueeze(1)
        self._positions = torch.from_numpy(positions).to(device)
        self._slots = torch.from_numpy(slots).to(device)
        self._cos = self._rope.cos[self._positions].unsqueeze(1)
        self._sin = self._rope.sin[self._positions].unsqueeze(1)

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attention."""
        layout = self._layout
        heads = [layout.n_head, layout.n_kv_head, layout.n_kv_head]
        q, k, v = torch.split(qkv.view(len(qkv), -1, layout.head_dim), heads, dim=1)
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys[self._slots, self._positions] = self._head(k, k_norm)
        values[self._slots, self._positions] = v
        out = self._varlen_attn(
            self._head(q, q_norm),
            keys,
            values,
            self._run_bounds,
            None,
            self._longest_run,
            self._longest,
            scale=1.0 / math.sqrt(layout.head_dim),
            window_size=(-1, 0),
            enable_gqa=layout.n_head != layout.n_kv_head,
            seqused_k=self._lengths,
            block_table=self._block_table,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out.reshape(len(qkv), -1)

    def _head(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Normalise and rotate heads: [rows, heads, head_dim], rotated in fp32."""
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, self._layout.norm_eps)
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self._cos - second * self._sin, second * self._cos + first * self._sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)
