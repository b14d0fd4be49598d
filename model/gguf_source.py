"""A GGUF file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import torch

from model.config import GGUF_ARCHITECTURES, ModelConfig, ModelError, base_frequencies, supported
from model.files import ModelFiles
from model.stored_tensor import StoredTensor


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

    def tensor(self, name: str) -> StoredTensor:
        """See TensorSource."""
        module, kind = name.rsplit(".", 1)
        at = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            at = f"blk.{layer}."
        found = self._stored(f"{at}{self._NAMES[module]}.{kind}")
        if self._interleaved and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = self.config.n_head if module.endswith("q_proj") else self.config.n_kv_head
            pairs = found.data.reshape(heads, self.config.head_dim // 2, 2, -1)
            found = replace(found, data=pairs.swapaxes(1, 2).reshape(found.data.shape))
        return replace(found, name=name)

    def _stored(self, name: str) -> StoredTensor:
        found = self._tensors[name]
        shape = tuple(int(size) for size in reversed(found.shape))
        return StoredTensor(name, shape, found.tensor_type, found.data.view(np.uint8))

    def _field(self, name: str, default: float | str | None = None) -> Any:  # noqa: ANN401
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is None:
            raise ModelError(f"the GGUF file has no field {name}")
        return default

    def _read_config(self) -> ModelConfig:
        kind = self._kind
        architecture = supported(GGUF_ARCHITECTURES.get(kind, kind))
        hidden, n_head = self._field(f"{kind}.embedding_length"), self._field(f"{kind}.attention.head_count")
        if "token_embd.weight" not in self._tensors:
            raise ModelError("tensor token_embd.weight is missing")
        context = int(self._field(f"{kind}.context_length"))
        # Within the window, sliding and full attention are the same; beyond it nobody may go.
        window = int(self._field(f"{kind}.attention.sliding_window", 0))
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
            context=min(context, window or context),
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
        frequencies = base_frequencies(self._field(f"{kind}.rope.freq_base", 10000.0), self.config.head_dim)
        if "rope_freqs.weight" in self._tensors:
            return frequencies / self._stored("rope_freqs.weight").to_float32()
        if scaling == "linear":
            return frequencies / float(self._field(f"{kind}.rope.scaling.factor"))
        if scaling != "none":
            raise ModelError(f"rope scaling {scaling} is not supported; supported: none, linear, llama3")
        return frequencies
