"""What the model's makers recommend, if it can be asked for at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.sampling_defaults import sampling_defaults
from model.files import ModelFiles


def test_only_what_a_request_could_say_is_taken(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, None, "x")
    assert sampling_defaults(files) == {}
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    other = {"do_sample": True, "max_length": 20, "min_p": None, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(said | other))
    assert sampling_defaults(files) == said
    assert sampling_defaults(ModelFiles(tmp_path, "x.gguf", "x")) == {}


def test_a_recommendation_that_nobody_could_ask_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 9}')
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature .*got 9"):
        sampling_defaults(ModelFiles(tmp_path, None, "x"))
