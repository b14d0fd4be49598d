"""NVIDIA GPUs: the library's matrix products, FlashAttention over pages, torch for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from model.backend import HeadLayout, Linear, Rope, check_sizes
from model.batch import IntArray
from model.row_counts import CANDIDATES, RowCounts, probe_row_counts
from model.storage import SlotStorage
from model.stored_tensor import StoredTensor

PAGE = 256
"""FlashAttention's pages, one per slot here, come in multiples of this many positions."""


class CudaLinear:
    """A weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return F.linear(x, self._weight, self._bias)


class CudaEmbedding:
    """A table that a tied output head shares."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, tokens: IntArray) -> torch.Tensor:
        """See Embedding."""
        return self._table[torch.from_numpy(tokens).to(self._table.device)]

    def head(self) -> Linear:
        """See Embedding."""
        return CudaLinear(self._table, None)


class CudaBackend:
    """See Backend. bfloat16 or float16."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None = None) -> Linear:
        """See Backend."""
        parts = [weight.to_float32().to(self.device, self.dtype) for weight in weights]
        return CudaLinear(torch.cat(parts), bias)

    def embedding(self, table: StoredTensor) -> CudaEmbedding:
        """See Backend."""
        return CudaEmbedding(table.to_float32().to(self.device, self.dtype))

    def row_counts(self, layers: Sequence[Linear], *, most: int | None = None) -> RowCounts:
        """See Backend."""
        counts = [count for count in CANDIDATES if most is None or count <= most]
        return probe_row_counts(layers, counts, self.device, self.dtype)

    def attention(self, layout: HeadLayout, rope: Rope) -> CudaAttention:
        """See Backend."""
        return CudaAttention(layout, rope)

    def storage(
        self,
        *,
        n_layer: int,
        num_slots: int,
        n_kv_head: int,
        max_len: int,
        head_dim: int,
        poison: bool = False,
    ) -> SlotStorage:
        """Both [layer, slot, max_len, head, head_dim], positions rounded up to a whole page."""
        check_sizes(num_slots, max_len)
        shape = (n_layer, num_slots + 1, math.ceil(max_len / PAGE) * PAGE, n_kv_head, head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return SlotStorage(keys, values, max_len=max_len, position_axis=2, poison=poison)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Backend."""
        x += delta
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


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

    def begin(self, positions: IntArray, slots: IntArray, storage: SlotStorage) -> None:
        """Copy to the device where each run of rows begins, its slot, and its length."""
        device = storage.keys.device
        starts = np.flatnonzero(
            np.r_[True, (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)]
        )
        ends = np.r_[starts[1:], len(slots)]
        self._storage = storage
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
        keys, values = self._storage.keys[layer], self._storage.values[layer]
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
