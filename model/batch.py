"""What one forward computes, and what an executor asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from model.storage import SlotStorage

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one ragged forward.

    A row is one token of one request. Rows of one slot are adjacent and their positions
    ascend by one, starting where the slot's keys and values end: so each row finds the keys of
    all positions before its own. Prefill and decode differ only in how many rows a slot brings.
    """

    tokens: IntArray
    """[rows] token ids."""
    positions: IntArray
    """[rows] position of each token in its own sequence."""
    slots: IntArray
    """[rows] slot that holds the sequence's keys and values."""
    logit_rows: IntArray
    """[samples] indices into the rows whose logits are wanted, ascending."""

    def __len__(self) -> int:
        return len(self.tokens)


class SlotModel(Protocol):
    """A model over slots: the transformer, or a toy in a test."""

    vocab_size: int

    def row_count(self, rows: int) -> int:
        """Rows really computed for `rows` asked: the next count at which results are exact."""
        ...

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        """Write the rows' keys and values into `storage` and return logits [samples, vocab], fp32."""
        ...
