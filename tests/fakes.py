"""A toy model whose every answer depends on every token it can see, through the real slot storage."""

from __future__ import annotations

import torch

from engine_actor.history import StepHistory
from engine_actor.metrics import EngineMetrics
from engine_actor.telemetry import Telemetry
from model.batch import Batch
from model.cpu.backend import CpuBackend
from model.storage import SlotStorage

VOCAB = 97


def fake_storage(num_slots: int = 4, max_len: int = 64, *, poison: bool = True) -> SlotStorage:
    return CpuBackend().storage(
        n_layer=1, num_slots=num_slots, n_kv_head=1, max_len=max_len, head_dim=1, poison=poison
    )


def fake_telemetry() -> Telemetry:
    """Watches, counts, and sends spans nowhere."""
    return Telemetry(StepHistory("engine"), EngineMetrics("engine", {}))


class FakeModel:
    """Caches token ids as values; the next token is a hash of all cached ids up to its position.

    A stale value, a wrong position or a neighbour's slot changes the answer, and a poisoned one
    (NaN) raises.
    """

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.forwards: list[Batch] = []

    def row_count(self, rows: int) -> int:
        return -(-rows // 4) * 4

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        self.forwards.append(batch)
        for token, position, slot in zip(batch.tokens, batch.positions, batch.slots, strict=True):
            storage.values[0, slot, 0, position, 0] = float(token)
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for sample, row in enumerate(batch.logit_rows):
            seen = storage.values[0, batch.slots[row], 0, : batch.positions[row] + 1, 0]
            logits[sample] = torch.rand(VOCAB, generator=torch.Generator().manual_seed(context_hash(seen)))
        return logits


def context_hash(tokens: torch.Tensor) -> int:
    value = 17
    for token in tokens.tolist():
        value = (value * 31 + int(token) + 1) % 1_000_003
    return value
