"""An engine from settings, on a small random model, and what it tells about itself."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert (info.slots, info.max_len, info.vocab_size) == (2, 16, engine.model.vocab_size)
