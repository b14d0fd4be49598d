"""What only a GPU can show; `python -m pytest tests/model/test_cuda.py` is the whole check."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.loader import load_model
from model.transformer import Transformer
from tests.engine_actor.test_equivalence import assert_company_changes_nothing
from tests.model.test_transformer import forward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(device="cuda")


def test_company_changes_no_bit_on_the_gpu(model: Transformer) -> None:
    assert_company_changes_nothing(model, requests=12, prompt=60, output=24)


def test_a_long_prompts_bits_do_not_depend_on_chunks_or_company(model: Transformer) -> None:
    """Over many of FlashAttention's blocks of keys, where splitting them would show."""
    rng = np.random.default_rng(2)
    prompt, other = (rng.integers(0, model.vocab_size, length) for length in (1500, 700))
    kv = model.new_storage(2, 1536)
    whole = forward(model, kv, (0, 0, prompt))
    forward(model, kv, (1, 0, other[:-8]))
    parts = [
        forward(
            model, kv, (0, start, prompt[start : start + 250]), (1, 692 + index, other[692 + index :][:1])
        )
        for index, start in enumerate(range(0, 1500, 250))
    ]
    assert torch.equal(whole, torch.cat([part[:-1] for part in parts]))


def test_the_gpu_agrees_with_the_cpu(model: Transformer) -> None:
    """bf16 keeps 8 bits, so the two agree in direction and in what is likeliest, not in bits."""
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 200)
    reference = load_model(device="cpu")
    found, expected = (
        forward(each, each.new_storage(1, 256), (0, 0, tokens)).cpu() for each in (model, reference)
    )
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8
