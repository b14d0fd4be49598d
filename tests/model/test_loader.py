"""What can be loaded, and what each thing that cannot be loaded says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model import files as files_module
from model.config import ModelError
from model.files import INSTALL, find_model
from model.loader import load_model
from model.storage import SlotStorage
from tests.model.test_transformer import forward, save_random_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_random_model(path, "llama")
    return path


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def test_shards_are_one_model(saved: Path, tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama", shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = np.arange(9)
    results = []
    for path in (saved, tmp_path):
        model = load_model(path, device="cpu")
        results.append(forward(model, model.new_storage(1, 16), (0, 0, tokens)))
    assert torch.equal(*results)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama", shard="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=re.escape(f"{shard.name} is missing")):
        load_model(tmp_path)


def test_an_unknown_architecture_is_named_with_the_supported_ones(broken: Path) -> None:
    edit_config(broken, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel .*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        load_model(broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": ...}, "has no num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope scaling yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "has no original_max_position"),
        ({"num_key_value_heads": 3}, "4 query heads must be a multiple of 3"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(broken: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(broken, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(broken)


def test_a_missing_tensor_is_named(broken: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(broken, **{name: None})
    with pytest.raises(ModelError, match=re.escape(f"tensor {name} is missing")):
        load_model(broken)


def test_a_misshapen_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, **{"model.norm.weight": torch.ones(65)})
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has shape \(65,\), expected \(64,\)"):
        load_model(broken)


def test_no_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        load_model(broken)


def test_a_cpu_computes_in_float32(saved: Path) -> None:
    with pytest.raises(ModelError, match=r"float32, not torch\.bfloat16"):
        load_model(saved, device="cpu", dtype=torch.bfloat16)


def test_the_window_bounds_the_context(broken: Path) -> None:
    edit_config(broken, architectures=["MistralForCausalLM"], sliding_window=100)
    model = load_model(broken, device="cpu")
    assert model.new_storage(1, 100).max_len == 100
    with pytest.raises(ValueError, match="max_len 101 exceeds the 100 tokens"):
        model.new_storage(1, 101)


def test_rows_outside_the_tables_are_refused(saved: Path) -> None:
    model = load_model(saved, device="cpu")
    kv = model.new_storage(2, 16)
    for slot, first, token, message in [
        (0, 0, 211, "tokens must lie in 0..210"),
        (0, 0, -1, "tokens must"),
        (0, 16, 1, "positions must lie in 0..15"),
        (kv.scratch + 1, 0, 1, "slots must lie in 0..2"),
    ]:
        with pytest.raises(ValueError, match=message):
            forward(model, kv, (slot, first, np.array([token])))
    assert forward(model, kv, (1, 15, np.array([210]))).shape == (1, 211)


def test_eos_tokens_of_the_generation_config_win(broken: Path) -> None:
    edit_config(broken, eos_token_id=3)
    (broken / "generation_config.json").unlink()
    assert load_model(broken, device="cpu").config.eos_token_ids == {3}
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(broken, device="cpu").config.eos_token_ids == {5, 6}


def test_the_packaged_model_is_found_as_a_file() -> None:
    found = find_model()
    assert found.gguf_file is not None
    assert (found.dir / found.gguf_file).is_file()


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=INSTALL):
        load_model()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model at"):
        load_model(tmp_path / "missing")


def test_a_broken_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all, whatever its name says")
    with pytest.raises(ModelError, match=r"broken\.gguf is not a readable GGUF file"):
        load_model(tmp_path / "broken.gguf")


def write_gguf(
    path: Path,
    saved: Path,
    *,
    architecture: str = "llama",
    skip: str = "",
    window: int | None = None,
    stored_as: gguf.GGMLQuantizationType | None = None,
) -> None:
    """The Hugging Face model as llama.cpp writes it: its names, q and k with rotary pairs interleaved.

    `stored_as` is claimed of the last norm, whose bytes are then zeros.
    """
    config = json.loads((saved / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(9)
    if window is not None:
        writer.add_sliding_window(window)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(saved / "model.safetensors").items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is not None:
            tensor = tensor.view(config[heads], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target == "output_norm.weight" and stored_as is not None:
            blocks, size = gguf.GGML_QUANT_SIZES[stored_as]
            row = np.zeros(tensor.numel() // blocks * size, np.uint8)
            writer.add_tensor(target, row, raw_dtype=stored_as)
        elif target != skip:
            writer.add_tensor(target, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_and_safetensors_are_the_same_model(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, saved)
    tokens = np.arange(20)
    from_gguf, from_safetensors = load_model(path, device="cpu"), load_model(saved, device="cpu")
    results = [
        forward(model, model.new_storage(1, 20), (0, 0, tokens)) for model in (from_gguf, from_safetensors)
    ]
    assert torch.equal(*results)
    assert from_gguf.config.eos_token_ids == {9}


def test_gguf_names_what_is_missing(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, saved, skip="blk.2.ffn_down.weight")
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.down_proj\.weight is missing"):
        load_model(path)


def test_gguf_of_another_architecture(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, saved, architecture="gemma")
    with pytest.raises(ModelError, match=r"architecture gemma .* LlamaForCausalLM"):
        load_model(path)


def test_a_cache_of_another_shape_is_not_needed_to_load(saved: Path) -> None:
    kv = load_model(saved, device="cpu").new_storage(3, 40, poison=True)
    assert isinstance(kv, SlotStorage)
    assert (kv.num_slots, kv.max_len, kv.poison) == (3, 40, True)


def test_a_window_in_a_gguf_bounds_the_context(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, saved, window=8)
    assert load_model(path, device="cpu").config.context == 8


def test_a_quantisation_that_cannot_be_read_is_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, saved, stored_as=gguf.GGMLQuantizationType.Q8_1)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is quantised as Q8_1"):
        load_model(path, device="cpu")


def test_one_file_of_several_says_how_to_make_them_one(tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00003.gguf"
    part.touch()
    with pytest.raises(FileNotFoundError, match=r"one of 3 files.*llama-gguf-split --merge"):
        find_model(part)
