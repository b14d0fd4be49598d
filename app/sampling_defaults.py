"""How a model's makers would have it sampled, where a request does not say."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from app.schemas import CompletionRequest
from model.files import ModelFiles

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(files: ModelFiles) -> dict[str, Any]:
    """Fields of a request by name, from a directory's generation_config.json. A GGUF file has none.

    Raises ValueError if no request could say the same.
    """
    file = files.dir / "generation_config.json"
    if files.gguf_file is not None or not file.is_file():
        return {}
    read = json.loads(file.read_text())
    found = {name: read[name] for name in FIELDS if read.get(name) is not None}
    try:
        CompletionRequest.model_validate({"prompt": "", **found})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file}: {first['loc'][0]} {first['msg']}, got {first['input']}") from None
    return found
