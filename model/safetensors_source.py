"""A Hugging Face directory: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from model.config import ModelConfig, ModelError, base_frequencies, llama3_scaled, supported
from model.files import ModelFiles
from model.stored_tensor import StoredTensor


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

    def tensor(self, name: str) -> StoredTensor:
        """See TensorSource."""
        return StoredTensor.of(name, self._files[name].get_tensor(name))


def _config_from_json(raw: Mapping[str, Any], directory: Path) -> ModelConfig:
    architecture = supported((raw.get("architectures") or [raw.get("model_type")])[0])
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
    frequencies = base_frequencies(rope["rope_theta"], config.head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return llama3_scaled(frequencies, rope)
    raise ModelError(f"rope scaling {kind} is not supported; supported: default, linear, llama3")
