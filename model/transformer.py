"""The transformer: Llama, Mistral, Qwen2 and Qwen3 are one architecture with a few switches.

One forward takes the rows of a ragged batch, whoever they belong to, and returns the logits of the
rows that want them. Everything but attention treats a row on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model.backend import Backend, Embedding, HeadLayout, Linear, Rope
from model.batch import Batch, IntArray
from model.config import ModelConfig
from model.storage import SlotStorage

CHECKED_TOKENS = 300
CHECKED_ROWS = 16
"""What the last start-up check compares: so many rows at the end of a sequence of so many tokens."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; q, k, v and gate, up are fused."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model's weights, on their device."""

    embedding: Embedding
    layers: list[Layer]
    norm: torch.Tensor
    head: Linear
    inverse_frequencies: torch.Tensor
    """[head_dim / 2], fp32: the rotary embedding's, scaling included."""


class Transformer:
    """A SlotModel: `forward` maps rows of tokens in slots to logits."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.weights = weights
        self.backend = backend
        layout = HeadLayout(config.n_head, config.n_kv_head, config.head_dim, config.norm_eps)
        rope = Rope(weights.inverse_frequencies, config.context, backend.device)
        self.attention = backend.attention(layout, rope)
        first = weights.layers[0]
        self.row_counts = backend.row_counts([first.qkv, first.output, first.gate_up, first.down])
        self.head_row_counts = backend.row_counts([weights.head], most=backend.most_head_rows)
        self.exact = self.row_counts.exact and self.head_row_counts.exact and company_changes_nothing(self)
        """Whether logits are a function of a sequence alone, as far as the start-up checks can tell."""

    def new_storage(self, num_slots: int, max_len: int, *, poison: bool = False) -> SlotStorage:
        """Slots for this model. Raises ValueError if `max_len` exceeds the model's context."""
        if max_len > self.config.context:
            raise ValueError(
                f"max_len {max_len} exceeds the {self.config.context} tokens the model can attend to"
            )
        return self.backend.storage(
            n_layer=self.config.n_layer,
            num_slots=num_slots,
            n_kv_head=self.config.n_kv_head,
            max_len=max_len,
            head_dim=self.config.head_dim,
            poison=poison,
        )

    def row_count(self, rows: int) -> int:
        """See SlotModel."""
        return sum(self.row_counts.tiles(rows))

    @torch.inference_mode()
    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        """See SlotModel. A batch beyond the largest exact row count runs as several, in order.

        Raises ValueError if a token, position, slot or logit row is out of range.
        """
        self.check(batch, storage)
        hidden = []
        start = 0
        for count in self.row_counts.tiles(len(batch)):
            end = min(start + count, len(batch))
            positions = _padded(batch.positions[start:end], count, 0)
            slots = _padded(batch.slots[start:end], count, storage.scratch)
            self.attention.begin(positions, slots, storage)
            tokens = torch.from_numpy(_padded(batch.tokens[start:end], count, 0))
            rows = self.hidden(tokens.to(self.backend.device))
            wanted = batch.logit_rows[(batch.logit_rows >= start) & (batch.logit_rows < end)] - start
            hidden.append(rows[torch.from_numpy(wanted).to(self.backend.device)])
            start = end
        return self._logits(torch.cat(hidden))

    def check(self, batch: Batch, storage: SlotStorage) -> None:
        """Raise ValueError for what would read or write outside the tables and the cache."""
        limits = (
            ("token", batch.tokens, self.vocab_size),
            ("position", batch.positions, min(storage.max_len, self.config.context)),
            # Scratch included: a caller's own padding rows go there.
            ("slot", batch.slots, storage.scratch + 1),
            ("logit row", batch.logit_rows, len(batch)),
        )
        for name, values, limit in limits:
            if len(values) and not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{name}s must lie in 0..{limit - 1}, got {values.min()}..{values.max()}")

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last block's output, normalised, for the rows that the attention has begun with.

        tokens: [rows], on the device. Returns [rows, hidden].
        """
        eps = self.config.norm_eps
        x = self.weights.embedding(tokens)
        delta = torch.zeros_like(x)
        for i, layer in enumerate(self.weights.layers):
            h = self.backend.add_rms_norm(x, delta, layer.attention_norm, eps)
            a = self.attention(i, layer.qkv(h), layer.q_norm, layer.k_norm)
            h = self.backend.add_rms_norm(x, layer.output(a), layer.mlp_norm, eps)
            delta = layer.down(self.backend.silu_mul(layer.gate_up(h)))
        return self.backend.add_rms_norm(x, delta, self.weights.norm, eps)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        counts = self.head_row_counts.tiles(len(rows))
        padded = F.pad(rows, (0, 0, 0, sum(counts) - len(rows)))
        tiles = [self.weights.head(part).float() for part in torch.split(padded, counts)]
        if len(tiles) == 1:
            return tiles[0][: len(rows)]
        return torch.cat(tiles)[: len(rows)] if tiles else rows.new_empty(0, self.vocab_size)


def _padded(values: IntArray, count: int, fill: int) -> IntArray:
    padded = np.full(count, fill)
    padded[: len(values)] = values
    return padded


def company_changes_nothing(model: Transformer) -> bool:
    """Whether a sequence's logits have the same bits alone and beside another one, in chunks.

    The last of the start-up checks: it runs the whole forward on this device, attention included, over
    so many keys that no kernel takes them in one piece.
    """
    length = min(CHECKED_TOKENS, model.config.context)
    storage = model.new_storage(2, length)
    rng = np.random.default_rng(0)
    sequence, other = rng.integers(0, model.vocab_size, (2, length))

    def logits(*runs: tuple[int, int, int]) -> torch.Tensor:
        """Of the CHECKED_ROWS last positions in slot 0, as far as these runs of (slot, first position, end)
        reach them."""
        positions = np.concatenate([np.arange(start, end) for _, start, end in runs])
        slots = np.concatenate([np.full(end - start, slot) for slot, start, end in runs])
        tokens = np.where(slots == 0, sequence[positions], other[positions])
        wanted = np.flatnonzero((slots == 0) & (positions >= length - CHECKED_ROWS))
        return model.forward(Batch(tokens, positions, slots, wanted), storage)

    alone = logits((0, 0, length))
    cut, last = length // 3, length - 1
    company = [
        logits((1, 0, cut // 2), (0, 0, cut)),
        logits((0, cut, last), (1, cut // 2, cut // 2 + 1)),
        logits((1, cut // 2 + 1, cut // 2 + 2), (0, last, length)),
    ]
    return torch.equal(alone, torch.cat(company))
