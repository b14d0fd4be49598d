"""Slot KV: one pre-allocated region of `max_len` positions per slot, and who owns it.

Every slot reserves `max_len` positions whether it fills them or not. That waste is the price
of a layout in which a request is a single index; see docs/continuous-batching.md.
"""

from __future__ import annotations

import math

import numpy as np
import torch


class SlotKV:
    """K, V: [n_layer, num_slots + 1, n_kv_head, max_len, head_dim]; a length per slot.

    The extra last slot is scratch: padding rows write there and no request owns it.
    Positions and masks come from `lengths` only, so a released slot's leftovers are unreachable.
    `poison` overwrites a slot with NaN when it is released, so that a test can prove it.
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
        shape = (n_layer, num_slots + 1, n_kv_head)
        # Keys lie transposed in memory: the CPU kernel's vector lanes are then neighbouring keys.
        self.keys = torch.zeros(*shape, head_dim, max_len, dtype=dtype, device=device).transpose(-1, -2)
        self.values = torch.zeros(*shape, max_len, head_dim, dtype=dtype, device=device)
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
