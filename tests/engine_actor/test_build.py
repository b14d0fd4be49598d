"""An engine from settings, on a small random model, and what it tells about itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine_actor.build import build_engine
from engine_actor.messages import EngineConfig
from tests.model.test_transformer import save_random_model


def test_an_engine_names_every_end_token_of_its_model(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    engine, info = build_engine(
        EngineConfig(str(tmp_path), device="cpu", threads=1, max_num_seqs=2, max_len=16)
    )
    assert info.eos_token_ids == {5, 6}
    assert (info.slots, info.max_len, info.vocab_size) == (2, 16, engine.executor.vocab_size)


def test_the_fingerprint_tells_weights_of_one_name_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, max_num_seqs: int) -> str:
        config = EngineConfig(
            str(tmp_path / name), device="cpu", threads=1, max_num_seqs=max_num_seqs, max_len=32
        )
        return build_engine(config)[1].fingerprint

    weights = save_random_model(tmp_path / "first" / "model", "llama")
    with torch.no_grad():
        next(weights.parameters())[-1] *= 1.01
    weights.save_pretrained(tmp_path / "second" / "model")
    assert fingerprint("first/model", 2) == fingerprint("first/model", 3)
    assert fingerprint("first/model", 2) != fingerprint("second/model", 2)
