"""CPUs: oneDNN's packed matrix products in fp32 and our own kernels for all else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from model.backend import HeadLayout, Linear, Rope, check_sizes
from model.cpu import rows
from model.cpu.attention import CpuAttention
from model.cpu.jit import LANES
from model.row_counts import CANDIDATES, RowCounts, probe_row_counts
from model.storage import SlotStorage
from model.stored_tensor import StoredTensor


class CpuLinear:
    """A weight packed by oneDNN where torch has it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._packed = has_onednn and weight.dtype == torch.float32
        # The hint is the row count the packed layout suits best; every count gives right results.
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self._packed else weight.contiguous()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        if self._packed:
            linear = torch.ops.mkldnn._linear_pointwise.default
            y: torch.Tensor = linear(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


class CpuEmbedding:
    """A table in fp32."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """See Embedding."""
        return self._table[tokens]

    def head(self) -> Linear:
        """See Embedding."""
        return CpuLinear(self._table, None)


class CpuBackend:
    """See Backend."""

    device = torch.device("cpu")
    dtype = torch.float32
    most_head_rows = 64

    def linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None = None) -> Linear:
        """See Backend."""
        return CpuLinear(torch.cat([weight.to_float32() for weight in weights]), bias)

    def embedding(self, table: StoredTensor) -> CpuEmbedding:
        """See Backend."""
        return CpuEmbedding(table.to_float32())

    def row_counts(self, layers: Sequence[Linear], *, most: int | None = None) -> RowCounts:
        """See Backend."""
        counts = [count for count in CANDIDATES if most is None or count <= most]
        return probe_row_counts(layers, counts, self.device, self.dtype)

    def attention(self, layout: HeadLayout, rope: Rope) -> CpuAttention:
        """See Backend."""
        return CpuAttention(layout, rope)

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
        """Keys [layer, slot, head, max_len / LANES, head_dim, LANES]: those of LANES positions lie together,
        transposed, so that vector lanes are neighbouring keys. Values [layer, slot, head, max_len, head_dim].
        Positions and the values' width are rounded up to LANES.
        """
        check_sizes(num_slots, max_len)
        blocks, width = math.ceil(max_len / LANES), math.ceil(head_dim / LANES) * LANES
        region = (n_layer, num_slots + 1, n_kv_head)
        keys = torch.zeros(*region, blocks, head_dim, LANES)
        values = torch.zeros(*region, blocks * LANES, width)
        return SlotStorage(keys, values, max_len=max_len, position_axis=3, key_block=LANES, poison=poison)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Backend."""
        out = torch.empty_like(x)
        rows.add_rms_norm(x.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        rows.silu_mul(gate_up.numpy(), out.numpy())
        return out
