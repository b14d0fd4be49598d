"""NVIDIA GPUs: the library's matrix products, FlashAttention over pages, recorded kernels (CUDA graphs)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from model.backend import HeadLayout, Linear, Rope, check_sizes
from model.config import ModelError
from model.paged_attention import PAGE, PagedAttention, VarlenKernel, plain_varlen_attn
from model.row_counts import RowCounts, probe_row_counts
from model.storage import SlotStorage
from model.stored_tensor import StoredTensor

ROW_COUNTS = (1, 8, 16, 32, 48, *range(64, 257, 32), 320, 384, 448, 512, 768, 1024, 1536, 2048)
"""Row counts tried. Up to some 300 rows a product takes as long as reading its weights, so few are enough."""
LEAST_CAPABILITY = (8, 0)
"""FlashAttention and bfloat16 begin with Ampere."""


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError if torch cannot use the device, or the device cannot compute in this dtype."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        capability = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        # Among them a driver that is too old, with its version and where to get another.
        raise ModelError(f"device is cuda, but torch can use no CUDA device here: {error}") from error
    if capability < LEAST_CAPABILITY:
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability}, and bfloat16 and "
            f"FlashAttention need {LEAST_CAPABILITY} (Ampere) or more: use device cpu"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"attention on CUDA computes in bfloat16 or float16, not {dtype}")


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

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """See Embedding."""
        return self._table[tokens]

    def head(self) -> Linear:
        """See Embedding."""
        return CudaLinear(self._table, None)


class CudaBackend:
    """See Backend. bfloat16 or float16, added up in fp32.

    It runs on a CPU too, in fp32 and with plain attention, where it is as slow as it is simple: so that what
    a GPU would run can be tested without one.
    """

    most_head_rows = 256

    def __init__(
        self, device: torch.device, dtype: torch.dtype, candidates: Sequence[int] = ROW_COUNTS
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._candidates = candidates
        if device.type == "cuda":
            # Sums over the whole inner dimension in one go: split in parts, by how many rows there are, and
            # the parts rounded, a row's bits would depend on its company. Only cuBLASLt lets itself be told.
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)

    def linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None = None) -> Linear:
        """See Backend."""
        parts = [weight.to_float32().to(self.device, self.dtype) for weight in weights]
        return CudaLinear(torch.cat(parts), bias)

    def embedding(self, table: StoredTensor) -> CudaEmbedding:
        """See Backend."""
        return CudaEmbedding(table.to_float32().to(self.device, self.dtype))

    def row_counts(self, layers: Sequence[Linear], *, most: int | None = None) -> RowCounts:
        """See Backend."""
        counts = [count for count in self._candidates if most is None or count <= most]
        return probe_row_counts(layers, counts, self.device, self.dtype)

    def attention(self, layout: HeadLayout, rope: Rope) -> PagedAttention:
        """See Backend."""
        return PagedAttention(layout, rope, self._kernel(layout))

    def _kernel(self, layout: HeadLayout) -> VarlenKernel:
        # What FlashAttention 2 can do, by its source.
        if self.device.type == "cpu" or layout.head_dim % 8 or layout.head_dim > 256:
            return plain_varlen_attn
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn

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


class CudaRuntime:
    """See Runtime: the current stream of a device, and CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def memory(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Runtime."""
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        return host, torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Runtime."""
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """See Runtime."""
        self._done.record()
        self._done.synchronize()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Runtime."""
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()  # libraries choose and load their kernels now, which cannot be recorded
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process have nothing to do with it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay
