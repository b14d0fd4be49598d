"""What differs between devices, behind one protocol: one file a backend, chosen once in the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from model.batch import IntArray
    from model.row_counts import RowCounts
    from model.storage import SlotStorage
    from model.stored_tensor import StoredTensor


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


class Linear(Protocol):
    """y = x W^T + b, with the weight in whatever form the backend multiplies best."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        ...


class Embedding(Protocol):
    """A vector for each token."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows] token ids, on the device, to [rows, width], which may be overwritten."""
        ...

    def head(self) -> Linear:
        """The same table as an output head: hidden states to logits."""
        ...


class Attention(Protocol):
    """Attention of one forward's rows; `begin` is called once, then the object per layer.

    Each row sees the keys 0..position of its own slot, and nothing else.
    """

    def begin(self, positions: IntArray, slots: IntArray, storage: SlotStorage) -> None:
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


class Backend(Protocol):
    """The kernels of one device, and the layouts that they want."""

    device: torch.device
    dtype: torch.dtype
    """What weights and activations are computed in."""
    most_head_rows: int
    """Rows of one product with the output head: few rows sample, and its products are large."""

    def linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None = None) -> Linear:
        """A linear layer of several weights [part of out, in], one below the other, and of `bias` [out];
        repacked once where kernels gain from it."""
        ...

    def embedding(self, table: StoredTensor) -> Embedding:
        """The embedding of `table` [vocab, width]."""
        ...

    def row_counts(self, layers: Sequence[Linear], *, most: int | None = None) -> RowCounts:
        """The row counts (up to `most`) at which these layers give a row the same bits in any company."""
        ...

    def attention(self, layout: HeadLayout, rope: Rope) -> Attention:
        """The attention of a model with these heads."""
        ...

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
        """Arrays for the keys and values of `num_slots` slots and one of scratch, in this backend's layout.

        Raises ValueError if there is no slot, or none that holds a token.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `x` in place and return rms_norm(x) * weight. x, delta: [rows, width]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [rows, 2 * width], gate first. Returns [rows, width]."""
        ...


def check_sizes(num_slots: int, max_len: int) -> None:
    """Raise ValueError unless there is a slot that holds a token."""
    if num_slots < 1 or max_len < 1:
        raise ValueError(f"num_slots and max_len must be at least 1, got {num_slots} and {max_len}")
