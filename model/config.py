"""What a model is: its shape and switches, however its files spell them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {
    "llama": SUPPORTED[0],
    "mistral": SUPPORTED[1],
    "qwen2": SUPPORTED[2],
    "qwen3": SUPPORTED[3],
}


class ModelError(ValueError):
    """The files are not a model that can be run; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, read from its files."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    norm_eps: float
    context: int
    """Positions the model can tell apart and attend to; no sequence may be longer."""
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]


def supported(found: str | None) -> str:
    """`found`. Raises ModelError if it is no supported architecture."""
    if found not in SUPPORTED:
        raise ModelError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")
    return found


def base_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Of the rotary embedding without any scaling: [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(theta, exponents).reciprocal()


def llama3_scaled(frequencies: torch.Tensor, rope: Mapping[str, float]) -> torch.Tensor:
    """Llama 3's scaling: long wavelengths are divided by `factor`, short ones kept, between: blended."""
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope["factor"]
