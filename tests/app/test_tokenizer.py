"""A model's files become a tokenizer, and only those files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from app import gguf_tokenizer
from app import tokenizer as module
from app.tokenizer import Tokenizer
from model.files import ModelFiles, find_model
from tests.app.conftest import cache_dir
from tests.app.gguf_files import byte_level


def directory(folder: Path, backend: Backend, **files: object) -> ModelFiles:
    """A Hugging Face directory; `files` are JSON by name."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles(folder, None, "x")


def test_a_token_is_shown_with_its_bytes(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🎉")[0]
    assert tokenizer.token_text(half) == "\\x" + tokenizer.token_bytes(half).hex("-").replace("-", "\\x")
    assert tokenizer.token_text(tokenizer.encode(" world")[0]) == " world"
    assert tokenizer.token_bytes(10**9) == b""


def test_a_decoder_that_cannot_be_followed_is_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend, {})


def test_the_template_writes_the_conversation(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_gguf_tokenizer_is_converted_once_by_each_version_of_the_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = byte_level(tmp_path / "x.gguf", "gpt-2")
    files = ModelFiles(tmp_path, file.name, "x")
    conversions = []

    def convert(*arguments: object, **options: object) -> object:
        conversions.append(arguments)
        return gguf_tokenizer.convert(file)

    monkeypatch.setattr(module, "convert", convert)
    for _ in range(2):
        Tokenizer.load(files, tmp_path)
    assert len(conversions) == 1
    monkeypatch.setattr(module, "VERSION", gguf_tokenizer.VERSION + 1)
    Tokenizer.load(files, tmp_path)
    assert len(conversions) == 2


def test_a_converted_tokenizer_is_there_at_once(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> None:
    started = time.process_time()
    assert len(Tokenizer.load(find_model(), cache_dir(tmp_path_factory))) == len(tokenizer)
    assert time.process_time() - started < 1


def test_a_replica_needs_no_torch_to_tokenize() -> None:
    code = "import sys, app.tokenizer; sys.exit(any(name in sys.modules for name in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_gguf_file_takes_nothing_from_what_lies_beside_it(tmp_path: Path, backend: Backend) -> None:
    other = {"eos_token_id": [7, 8]}
    directory(tmp_path, backend, generation_config=other, tokenizer_config={"chat_template": "{{ 1 }}"})
    byte_level(tmp_path / "x.gguf", "gpt-2", fields={"eos_token_id": 3})
    loaded = Tokenizer.load(ModelFiles(tmp_path, "x.gguf", "x"), tmp_path)
    assert loaded.eos_token_ids == {3}
    assert not loaded.has_chat_template
    assert len(loaded) == 256


def test_end_tokens_come_from_the_tokenizer_and_the_generation_config(
    tmp_path: Path, backend: Backend
) -> None:
    files = directory(
        tmp_path,
        backend,
        generation_config={"eos_token_id": [0, 7]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    assert Tokenizer.load(files, tmp_path).eos_token_ids == {0, 2, 7}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 81]),
        ({"add_bos_token": False}, [81]),
        ({"add_eos_token": True}, [1, 81, 2]),
        ({"add_bos_token": True, "add_eos_token": False}, [1, 81]),
    ],
)
def test_what_stands_around_a_text_is_what_the_configuration_says(
    tmp_path: Path, backend: Backend, config: dict[str, bool], expected: list[int]
) -> None:
    changed = Backend.from_str(backend.to_str())
    changed.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    loaded = Tokenizer.load(directory(tmp_path, changed, tokenizer_config=names | config), tmp_path)
    assert loaded.encode("a") == expected
    assert loaded.encode("a", add_special_tokens=False) == [81]


def test_a_text_is_never_cut_or_filled_up(tmp_path: Path, backend: Backend) -> None:
    changed = Backend.from_str(backend.to_str())
    changed.enable_truncation(4)
    changed.enable_padding(length=9)
    loaded = Tokenizer.load(directory(tmp_path, changed), tmp_path)
    assert loaded.encode("a" * 100) == backend.encode("a" * 100).ids
    assert loaded.encode("a") == [81]


def test_a_directory_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.load(ModelFiles(tmp_path, None, "x"), tmp_path)


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_ordinary_text_has_the_tokens_that_the_library_gives_it(
    tokenizer: Tokenizer, backend: Backend, text: str
) -> None:
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode(text, parse_special=False) == backend.encode(text).ids
