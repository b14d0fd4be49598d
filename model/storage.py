"""The arrays of the slots: keys and values, pre-allocated. Who owns a slot is the scheduler's business."""

from __future__ import annotations

import math

import torch


class SlotStorage:
    """K, V: n_layer x (num_slots + 1) x n_kv_head x max_len x head_dim, in the order that a backend's
    attention kernel wants them (see `Backend.storage`).

    The extra last slot is scratch: padding rows write there and no request owns it. A row of a forward
    attends to the positions up to its own, and all of them have been written since the slot was given to its
    owner, so that the leftovers of whoever had it before are unreachable. `poison` overwrites a slot that is
    forgotten with NaN, so that a test can show it.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        max_len: int,
        position_axis: int,
        key_block: int = 1,
        poison: bool = False,
    ) -> None:
        """keys, values: [n_layer, num_slots + 1, ...], with positions along `position_axis`; those of keys in
        blocks of `key_block`, the position within a block along the last axis."""
        self.keys = keys
        self.values = values
        self.num_slots = keys.shape[1] - 1
        self.max_len = max_len
        self.scratch = self.num_slots
        self.poison = poison
        self._blocks = (
            (keys.movedim(position_axis, 2), key_block),
            (values.movedim(position_axis, 2), 1),
        )

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: int, slot: int, length: int) -> None:
        """Give `slot` the keys and values of the first `length` positions of `source`, in all layers."""
        for part, block in self._blocks:
            blocks = math.ceil(length / block)
            part[:, slot, :blocks].copy_(part[:, source, :blocks])

    def forget(self, slot: int, length: int = 0) -> None:
        """Nobody will read what the slot holds beyond its first `length` positions."""
        if not self.poison:
            return
        for part, block in self._blocks:
            whole, rest = divmod(length, block)
            if rest:
                part[:, slot, whole, ..., rest:] = math.nan
            part[:, slot, whole + bool(rest) :] = math.nan
