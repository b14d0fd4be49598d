"""Model files to a Transformer: GGUF, or a Hugging Face directory of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch

from model.backend import Backend, Linear
from model.config import ModelConfig, ModelError
from model.files import find_model
from model.gguf_source import GgufSource
from model.safetensors_source import SafetensorsSource
from model.stored_tensor import StoredTensor
from model.transformer import Layer, Transformer, Weights


def load_model(
    path: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    backend: Backend | None = None,
) -> Transformer:
    """Load a GGUF file, a Hugging Face directory or (None) the packaged model.

    Defaults: CUDA and bf16 where there is one, else CPU and fp32, with the backend for that. Raises
    FileNotFoundError if there is no such model and ModelError if it is not a supported or not a whole one.
    """
    backend = backend or choose_backend(device, dtype)
    files = find_model(path)
    source: TensorSource = SafetensorsSource(files) if files.gguf_file is None else GgufSource(files)
    _check_heads(source.config)
    try:
        return Transformer(source.config, _weights(source, backend), backend)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{files.name} does not fit into the memory of {backend.device}: {error}") from error


def _check_heads(c: ModelConfig) -> None:
    if c.n_head % c.n_kv_head or c.head_dim % 2:
        raise ModelError(
            f"{c.n_head} query heads must be a multiple of {c.n_kv_head} key heads, "
            f"and their size even, got {c.head_dim}"
        )


def choose_backend(device: torch.device | str | None, dtype: torch.dtype | str | None) -> Backend:
    """The kernels for a device and a dtype; None: CUDA and bf16 where there is one, else CPU and fp32.

    Raises ModelError for what this machine or its kernels cannot do.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    elif isinstance(dtype, str):
        dtype = cast(torch.dtype, getattr(torch, dtype))
    if device.type == "cpu":
        if dtype != torch.float32:
            raise ModelError(f"the CPU kernels compute in float32, not {dtype}")
        from model.cpu.backend import CpuBackend

        return CpuBackend()
    if device.type != "cuda":
        raise ModelError(f"there are no kernels for device {device.type}: use cpu or cuda")
    from model.cuda import CudaBackend, check_device

    check_device(device, dtype)
    return CudaBackend(device, dtype)


class TensorSource(Protocol):
    """A model's files behind Hugging Face's tensor names."""

    config: ModelConfig
    inverse_frequencies: torch.Tensor

    def tensor(self, name: str) -> StoredTensor:
        """The named tensor. Raises KeyError if there is none."""
        ...


def _weights(source: TensorSource, backend: Backend) -> Weights:
    c = source.config
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim

    def stored(name: str, *shape: int) -> StoredTensor:
        try:
            found = source.tensor(name)
        except KeyError:
            raise ModelError(f"tensor {name} is missing") from None
        if found.shape != shape:
            raise ModelError(f"tensor {name} has shape {found.shape}, expected {shape}")
        return found

    def tensor(name: str, *shape: int) -> torch.Tensor:
        return stored(name, *shape).to_float32().to(backend.device, backend.dtype)

    def linear(parts: dict[str, int], width: int, bias: bool) -> Linear:
        """Several projections of one input as one layer."""
        weights = [stored(f"{name}.weight", rows, width) for name, rows in parts.items()]
        biases = [tensor(f"{name}.bias", rows) for name, rows in parts.items()] if bias else []
        return backend.linear(weights, torch.cat(biases) if bias else None)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        qkv = {f"{at}.self_attn.q_proj": q, f"{at}.self_attn.k_proj": kv, f"{at}.self_attn.v_proj": kv}
        gate_up = {f"{at}.mlp.gate_proj": c.intermediate_size, f"{at}.mlp.up_proj": c.intermediate_size}
        return Layer(
            attention_norm=tensor(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=linear(qkv, c.hidden_size, c.qkv_bias),
            q_norm=tensor(f"{at}.self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=tensor(f"{at}.self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            output=linear({f"{at}.self_attn.o_proj": c.hidden_size}, q, c.output_bias),
            mlp_norm=tensor(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=linear(gate_up, c.hidden_size, c.mlp_bias),
            down=linear({f"{at}.mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    table = (c.vocab_size, c.hidden_size)
    embedding = backend.embedding(stored("model.embed_tokens.weight", *table))
    return Weights(
        embedding=embedding,
        layers=[layer(i) for i in range(c.n_layer)],
        norm=tensor("model.norm.weight", c.hidden_size),
        head=embedding.head() if c.tied_head else backend.linear([stored("lm_head.weight", *table)]),
        inverse_frequencies=source.inverse_frequencies,
    )
