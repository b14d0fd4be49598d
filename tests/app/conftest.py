from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from app.gguf_tokenizer import convert
from app.tokenizer import Tokenizer
from model.files import find_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The packaged model's tokenizer: byte-level, with a chat template."""
    return Tokenizer.load(find_model(), cache_dir(tmp_path_factory))


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The packaged model's tokenizer as tokenizers has it, with nothing of ours around it."""
    files = find_model()
    return convert(files.dir / (files.gguf_file or ""))[0]


def cache_dir(factory: pytest.TempPathFactory) -> Path:
    # Shared between the workers of one test run: converting the tokenizer takes seconds.
    return factory.getbasetemp().parent / "slotserve-tokenizers"
