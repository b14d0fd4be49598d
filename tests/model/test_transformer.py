"""The forward against transformers, and against itself in other company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model.batch import Batch
from model.cpu.attention import CpuAttention
from model.files import find_model
from model.loader import load_model
from model.storage import SlotStorage
from model.transformer import Transformer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-biased-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
}


def save_random_model(directory: Path, variant: str, *, shard: str = "5GB") -> transformers.PreTrainedModel:
    """A tiny model with seeded random weights, biases and norms included."""
    settings = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 16,
    } | VARIANTS[variant]
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + float("norm" in name))
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def forward(model: Transformer, storage: SlotStorage, *runs: tuple[int, int, np.ndarray]) -> torch.Tensor:
    """Logits of all rows of runs of (slot, first position, tokens)."""
    tokens = np.concatenate([run for _, _, run in runs])
    positions = np.concatenate([np.arange(first, first + len(run)) for _, first, run in runs])
    slots = np.concatenate([np.full(len(run), slot) for slot, _, run in runs])
    return model.forward(Batch(tokens, positions, slots, np.arange(len(tokens))), storage)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, variant)
    model = load_model(tmp_path, device="cpu")
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 200)
    kv = model.new_storage(1, 256)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)[None]).logits[0]
    found = torch.cat([forward(model, kv, (0, 0, tokens[:77])), forward(model, kv, (0, 77, tokens[77:]))])
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-4


def differing_rows(model: Transformer, seed: int, lengths: list[int]) -> int:
    """Rows whose logits differ in any bit between alone, in one forward, and a random mix of chunks."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, model.vocab_size, length) for length in lengths]
    kv = model.new_storage(len(lengths), max(lengths), poison=True)
    alone = []
    for sequence in sequences:
        alone.append(forward(model, kv, (0, 0, sequence)))
        kv.forget(0)
    slots = list(range(len(sequences)))
    done = [0] * len(sequences)
    mixed: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        runs = []
        for i in rng.permutation(len(sequences)):
            chunk = int(min(len(sequences[i]) - done[i], rng.choice([0, 1, 1, 2, 5, 19])))
            if chunk:
                runs.append((i, chunk))
        if not runs:
            continue
        logits = forward(
            model, kv, *((slots[i], done[i], sequences[i][done[i] : done[i] + chunk]) for i, chunk in runs)
        )
        for (i, chunk), part in zip(runs, torch.split(logits, [chunk for _, chunk in runs]), strict=True):
            mixed[i].append(part)
            done[i] += chunk
    return sum(
        int((a.view(torch.int32) != torch.cat(m).view(torch.int32)).any(dim=1).sum())
        for a, m in zip(alone, mixed, strict=True)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_company_changes_no_bit(variant: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, variant)
    model = load_model(tmp_path, device="cpu")
    assert model.exact
    assert differing_rows(model, 3, [1, 15, 16, 17, 40, 97]) == 0


def test_a_batch_beyond_the_largest_row_count_is_cut(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    model = load_model(tmp_path, device="cpu")
    rng = np.random.default_rng(2)
    runs = [(slot, 0, rng.integers(0, model.vocab_size, 230)) for slot in range(3)]
    assert model.row_count(690) > model.row_counts.kept[-1]
    together = forward(model, model.new_storage(3, 230), *runs)
    alone = torch.cat([forward(model, model.new_storage(3, 230), run) for run in runs])
    assert torch.equal(together, alone)


def test_rows_that_want_no_logits_get_none(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    model = load_model(tmp_path, device="cpu")
    kv, zero, none = model.new_storage(1, 8), np.zeros(1, np.int64), np.zeros(0, np.int64)
    assert model.forward(Batch(zero, zero, zero, none), kv).shape == (0, model.vocab_size)
    assert kv.keys[:, 0].any()


@pytest.fixture(scope="module")
def packaged() -> Transformer:
    return load_model(device="cpu")


def test_company_changes_no_bit_of_the_packaged_model(packaged: Transformer) -> None:
    assert packaged.exact
    assert differing_rows(packaged, 4, [1, 3, 30, 61, 90]) == 0


def test_greedy_tokens_equal_transformers(packaged: Transformer) -> None:
    files = find_model()
    where: dict[str, Any] = {"gguf_file": files.gguf_file}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(files.dir, **where)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        files.dir, dtype=torch.float32, **where
    )
    message = [{"role": "user", "content": "What is continuous batching?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    generated = reference.generate(
        torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    kv = packaged.new_storage(1, 256)
    tokens = list(prompt)
    logits = forward(packaged, kv, (0, 0, np.array(prompt)))
    while len(tokens) < len(prompt) + 64:
        tokens.append(int(logits[-1].argmax()))
        logits = forward(packaged, kv, (0, len(tokens) - 1, np.array(tokens[-1:])))
    assert tokens == generated[0].tolist()


def test_the_last_check_at_start_up_looks_at_the_whole_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path, "llama")
    model = load_model(tmp_path, device="cpu")
    assert model.exact
    attend = CpuAttention.__call__

    def depends_on_company(self: CpuAttention, layer: int, qkv: torch.Tensor, *norms: Any) -> torch.Tensor:
        out: torch.Tensor = attend(self, layer, qkv, *norms)
        return out * (1 + 1e-6 * len(qkv))

    monkeypatch.setattr(CpuAttention, "__call__", depends_on_company)
    assert not load_model(tmp_path, device="cpu").exact
