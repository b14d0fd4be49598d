"""Model files to a Transformer: GGUF, or a Hugging Face directory of safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import gguf
import numpy as np
import torch
from safetensors import safe_open

from model.backend import Backend, Linear
from model.files import ModelFiles, find_model
from model.transformer import Layer, ModelConfig, Transformer, Weights

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {
    "llama": SUPPORTED[0],
    "mistral": SUPPORTED[1],
    "qwen2": SUPPORTED[2],
    "qwen3": SUPPORTED[3],
}


class ModelError(ValueError):
    """The files are not a model that can be run; the message names what is wrong."""


def load_model(
    path: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Transformer:
    """Load a GGUF file, a Hugging Face directory or (None) the packaged model.

    Defaults: CUDA and bf16 where there is one, else CPU and fp32. Raises FileNotFoundError if there
    is no such model and ModelError if it is not a supported or not a whole one.
    """
    backend = choose_backend(device, dtype)
    files = find_model(path)
    source: TensorSource = SafetensorsSource(files) if files.gguf_file is None else GgufSource(files)
    _check_heads(source.config)
    return Transformer(source.config, _weights(source, backend), backend)


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
    if not torch.cuda.is_available():
        raise ModelError("device is cuda, but torch sees no CUDA device on this machine")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"attention on CUDA computes in bfloat16 or float16, not {dtype}")
    from model.cuda import CudaBackend

    return CudaBackend(device, dtype)


class TensorSource(Protocol):
    """A model's files behind Hugging Face's tensor names."""

    config: ModelConfig
    inverse_frequencies: torch.Tensor

    def tensor(self, name: str) -> torch.Tensor:
        """The named tensor on the CPU. Raises KeyError if there is none."""
        ...


def _weights(source: TensorSource, backend: Backend) -> Weights:
    c = source.config
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim

    def tensor(name: str, *shape: int) -> torch.Tensor:
        try:
            found = source.tensor(name)
        except KeyError:
            raise ModelError(f"tensor {name} is missing") from None
        if tuple(found.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(found.shape)}, expected {shape}")
        return found.to(backend.device, backend.dtype)

    def linear(parts: Mapping[str, int], width: int, bias: bool) -> Linear:
        """Several projections of one input as one matrix."""
        weight = torch.cat([tensor(f"{name}.weight", rows, width) for name, rows in parts.items()])
        biases = [tensor(f"{name}.bias", rows) for name, rows in parts.items()] if bias else []
        return backend.linear(weight, torch.cat(biases) if bias else None)

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

    embedding = tensor("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    return Weights(
        embedding=embedding,
        layers=[layer(i) for i in range(c.n_layer)],
        norm=tensor("model.norm.weight", c.hidden_size),
        head=backend.linear(
            embedding if c.tied_head else tensor("lm_head.weight", c.vocab_size, c.hidden_size)
        ),
        inverse_frequencies=source.inverse_frequencies,
    )


class SafetensorsSource:
    """A Hugging Face directory: config.json and one or several safetensors files."""

    def __init__(self, files: ModelFiles) -> None:
        raw = json.loads((files.dir / "config.json").read_text())
        try:
            self.config = _config_from_json(raw, files.dir)
            self.inverse_frequencies = _inverse_frequencies(raw, self.config)
        except KeyError as error:
            raise ModelError(f"{files.dir / 'config.json'} has no {error.args[0]}") from None
        self._files: dict[str, Any] = {}
        shards = sorted(files.dir.glob("*.safetensors"))
        index = files.dir / "model.safetensors.index.json"
        if index.is_file():
            shards = sorted(
                {files.dir / name for name in json.loads(index.read_text())["weight_map"].values()}
            )
        if not shards:
            raise ModelError(f"{files.dir} has no .safetensors files")
        for shard in shards:
            if not shard.is_file():
                raise ModelError(f"{shard.name} is missing from {files.dir}, though {index.name} lists it")
            opened: Any = safe_open(shard, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found


def _architecture(found: str | None) -> str:
    if found not in SUPPORTED:
        raise ModelError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")
    return found


def _config_from_json(raw: Mapping[str, Any], directory: Path) -> ModelConfig:
    architecture = _architecture((raw.get("architectures") or [raw.get("model_type")])[0])
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']} is not supported; supported: silu")
    if "quantization_config" in raw:
        raise ModelError(
            "quantised safetensors are not supported; use the unquantised weights or a GGUF file"
        )
    n_head = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = json.loads(generation.read_text()).get("eos_token_id", eos)
    context = raw.get("max_position_embeddings", 2048)
    window = raw.get("sliding_window")
    if window is not None and raw.get("use_sliding_window", architecture == "MistralForCausalLM"):
        # Within the window, sliding and full attention are the same; beyond it nobody may go.
        context = min(context, window)
    qwen2, biased = architecture == "Qwen2ForCausalLM", bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        n_layer=raw["num_hidden_layers"],
        n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // n_head,
        norm_eps=raw["rms_norm_eps"],
        context=context,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or biased,
        output_bias=biased and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )


def _inverse_frequencies(raw: Mapping[str, Any], config: ModelConfig) -> torch.Tensor:
    """The rotary embedding's frequencies; `raw` in the old or the new style of config.json."""
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    rope |= raw.get("rope_parameters") or {}
    frequencies = _base_frequencies(rope["rope_theta"], config.head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3_scaled(frequencies, rope)
    raise ModelError(f"rope scaling {kind} is not supported; supported: default, linear, llama3")


def _base_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(theta, exponents).reciprocal()


def _llama3_scaled(frequencies: torch.Tensor, rope: Mapping[str, float]) -> torch.Tensor:
    """Llama 3's scaling: long wavelengths are divided by `factor`, short ones kept, between: blended."""
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope["factor"]


class GgufSource:
    """One GGUF file; quantised tensors are dequantised as they are asked for."""

    _NAMES = {  # noqa: RUF012
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }

    def __init__(self, files: ModelFiles) -> None:
        assert files.gguf_file is not None
        try:
            self._reader = gguf.GGUFReader(files.dir / files.gguf_file)
        except (ValueError, IndexError) as error:
            raise ModelError(f"{files.gguf_file} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._kind = str(self._field("general.architecture"))
        self.config = self._read_config()
        self.inverse_frequencies = self._read_frequencies()
        # llama.cpp stores the rotary pairs of Llama's q and k next to each other, not half a head apart.
        self._interleaved = self._kind in ("llama", "mistral")

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource."""
        module, kind = name.rsplit(".", 1)
        at = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            at = f"blk.{layer}."
        found = self._read(f"{at}{self._NAMES[module]}.{kind}")
        if self._interleaved and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = self.config.n_head if module.endswith("q_proj") else self.config.n_kv_head
            pairs = found.view(heads, self.config.head_dim // 2, 2, -1)
            found = pairs.transpose(1, 2).reshape(found.shape)
        return found

    def _read(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        return torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type), np.float32))

    def _field(self, name: str, default: float | str | None = None) -> Any:  # noqa: ANN401
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is None:
            raise ModelError(f"the GGUF file has no field {name}")
        return default

    def _read_config(self) -> ModelConfig:
        kind = self._kind
        architecture = _architecture(GGUF_ARCHITECTURES.get(kind, kind))
        hidden, n_head = self._field(f"{kind}.embedding_length"), self._field(f"{kind}.attention.head_count")
        if "token_embd.weight" not in self._tensors:
            raise ModelError("tensor token_embd.weight is missing")
        ends = [self._field(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")]
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=self._field(f"{kind}.feed_forward_length"),
            n_layer=self._field(f"{kind}.block_count"),
            n_head=n_head,
            n_kv_head=self._field(f"{kind}.attention.head_count_kv", n_head),
            head_dim=self._field(f"{kind}.attention.key_length", hidden // n_head),
            norm_eps=self._field(f"{kind}.attention.layer_norm_rms_epsilon"),
            context=self._field(f"{kind}.context_length"),
            tied_head="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            eos_token_ids=frozenset(int(token) for token in ends if token >= 0),
        )

    def _read_frequencies(self) -> torch.Tensor:
        kind = self._kind
        scaling = self._field(f"{kind}.rope.scaling.type", "none")
        frequencies = _base_frequencies(self._field(f"{kind}.rope.freq_base", 10000.0), self.config.head_dim)
        if "rope_freqs.weight" in self._tensors:
            return frequencies / self._read("rope_freqs.weight")
        if scaling == "linear":
            return frequencies / float(self._field(f"{kind}.rope.scaling.factor"))
        if scaling != "none":
            raise ModelError(f"rope scaling {scaling} is not supported; supported: none, linear, llama3")
        return frequencies
