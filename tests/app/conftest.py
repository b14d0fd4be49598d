from __future__ import annotations

from pathlib import Path

import pytest

from app.text import Tokenizer
from model.files import find_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The packaged model's tokenizer: byte-level, with a chat template."""
    return Tokenizer.load(find_model(), cache_dir(tmp_path_factory))


def cache_dir(factory: pytest.TempPathFactory) -> Path:
    # Shared between the workers of one test run: converting the tokenizer takes seconds.
    return factory.getbasetemp().parent / "slotserve-tokenizers"
