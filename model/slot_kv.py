"""Slot KV: one pre-allocated region of `max_len` positions per slot, and who owns it.

Every slot reserves `max_len` positions whether it fills them or not. That waste is the price
of a layout in which a request is a single index; see docs/continuous-batching.md.
"""

from __future__ import annotations

import math

import numpy as np
import torch

KEY_BLOCK = 16
"""CPU: positions whose keys lie together, transposed, so that vector lanes are neighbouring keys."""
CUDA_PAGE = 256
"""CUDA: FlashAttention's pages, one per slot here, come in multiples of this many positions."""


class SlotKV:
    """K, V: n_layer x (num_slots + 1) x n_kv_head x max_len x head_dim; a length per slot.

    The extra last slot is scratch: padding rows write there and no request owns it.
    `lengths` says how many positions of a slot are filled. A row of a forward attends to the positions up to
    its own, and all of them have been written since the slot was acquired, so that the leftovers of whoever
    had it before are unreachable. `poison` overwrites a slot with NaN when it is released, so that a test can
    prove it.

    The order in memory is the attention kernel's: on a CPU, keys
    [layer, slot, head, max_len / KEY_BLOCK, head_dim, KEY_BLOCK] and values
    [layer, slot, head, max_len, head_dim rounded up to KEY_BLOCK]; on CUDA both
    [layer, slot, max_len, head, head_dim]. Positions are rounded up to a whole block or page;
    `max_len` stays what was asked for.
    """

    def __init__(
        self,
        *,
        n_layer: int,
        num_slots: int,
        n_kv_head: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        if num_slots < 1 or max_len < 1:
            raise ValueError(f"num_slots and max_len must be at least 1, got {num_slots} and {max_len}")
        self.num_slots = num_slots
        self.max_len = max_len
        self.scratch = num_slots
        self.poison = poison
        slots = num_slots + 1
        if torch.device(device).type == "cpu":
            blocks = math.ceil(max_len / KEY_BLOCK)
            width = math.ceil(head_dim / KEY_BLOCK) * KEY_BLOCK
            key_shape: tuple[int, ...] = (n_layer, slots, n_kv_head, blocks, head_dim, KEY_BLOCK)
            value_shape: tuple[int, ...] = (n_layer, slots, n_kv_head, blocks * KEY_BLOCK, width)
        else:
            page = math.ceil(max_len / CUDA_PAGE) * CUDA_PAGE
            key_shape = value_shape = (n_layer, slots, page, n_kv_head, head_dim)
        self.keys = torch.zeros(key_shape, dtype=dtype, device=device)
        self.values = torch.zeros(value_shape, dtype=dtype, device=device)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def tokens(self) -> int:
        """Cached tokens over all slots."""
        return int(self.lengths.sum())

    def acquire(self) -> int:
        """Take a free slot; its length is 0. Raises IndexError when none is free."""
        return self._free.pop()

    def clear(self, slot: int) -> None:
        """Forget what the slot holds; its owner keeps it."""
        self.lengths[slot] = 0
        if self.poison:
            self.keys[:, slot] = math.nan
            self.values[:, slot] = math.nan

    def release(self, slot: int) -> None:
        """Clear the slot and give it back; the next request may take it in the same step."""
        if slot in self._free or not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not held")
        self.clear(slot)
        self._free.append(slot)
