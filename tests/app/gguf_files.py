"""Small GGUF files that hold a tokenizer and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import gguf

Fields: TypeAlias = Mapping[str, bool | int | str]
NONE: Fields = MappingProxyType({})

NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = range(1, 7)

ALPHABET = [
    *(chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))),
    *(chr(code) for code in range(256, 256 + 68)),
]
"""GPT-2's character for each byte, in its own order."""


def byte_level(
    file: Path,
    pre: str | None,
    words: Sequence[str] = (),
    merges: Sequence[str] = (),
    control: Sequence[str] = (),
    fields: Fields = NONE,
) -> Path:
    """Every byte, then `words`, then `control` tokens. `fields` are those after `tokenizer.ggml.`."""
    tokens = [*ALPHABET, *words, *control]
    writer = begun(
        file, "gpt2", tokens, [*[NORMAL] * (len(tokens) - len(control)), *[CONTROL] * len(control)]
    )
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_merges(list(merges))
    return finished(writer, file, fields)


def sentencepiece(file: Path, pieces: Mapping[str, float], fields: Fields = NONE) -> Path:
    """`<unk>`, `<s>`, `</s>`, every byte, then `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    writer = begun(file, "llama", tokens, types)
    writer.add_token_scores([*[0.0] * (len(tokens) - len(pieces)), *pieces.values()])
    return finished(writer, file, fields)


def begun(file: Path, model: str, tokens: list[str], types: list[int]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    return writer


def finished(writer: gguf.GGUFWriter, file: Path, fields: Fields) -> Path:
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file
