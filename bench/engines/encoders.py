"""Tokenizers of other makers in a process and an environment of their own: strings in, token ids out.

The command line names one of them: `openvino FILE.gguf`, or a family whose vocabulary a package carries,
read by the library that it is published for. The first line out describes that vocabulary as a GGUF
file would; then each line of strings, a JSON list, is answered with their ids.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in llama_models.llama3.tokenizer, whose import wants more than it needs."""
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
"""As in dashscope.tokenizers.qwen_tokenizer."""
LLAMA4 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in llama_models.llama4.tokenizer."""

Encode = Callable[[str], list[int]]


def openvino(model: str) -> tuple[dict[str, Any], Encode]:
    """OpenVINO's own reader of the GGUF file."""
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(model)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False).input_ids
        return [int(token) for token in ids.data[0]]

    return {}, encode


def llama_bpe() -> tuple[dict[str, Any], Encode]:
    """Llama 3."""
    return _tiktoken(_ranks(_folder("llama_models") / "llama3" / "tokenizer.model"), LLAMA3)


def llama4() -> tuple[dict[str, Any], Encode]:
    """Llama 4, whose splitting is GPT-4o's."""
    return _tiktoken(_ranks(_folder("llama_models") / "llama4" / "tokenizer.model"), LLAMA4)


def qwen2() -> tuple[dict[str, Any], Encode]:
    """Qwen, which composes characters first."""
    ranks = _ranks(_folder("dashscope") / "resources" / "qwen.tiktoken")
    return _tiktoken(ranks, QWEN, lambda text: unicodedata.normalize("NFC", text))


def tekken() -> tuple[dict[str, Any], Encode]:
    """Mistral's Tekken."""
    read = json.loads((_folder("mistral_common") / "data" / "tekken_240911.json").read_text())
    size = read["config"]["default_vocab_size"] - read["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in read["vocab"][:size]}
    return _tiktoken(ranks, read["config"]["pattern"])


def llama() -> tuple[dict[str, Any], Encode]:
    """Mistral's first one, a SentencePiece model."""
    import sentencepiece

    file = _folder("mistral_common") / "data" / "tokenizer.model.v1"
    model = sentencepiece.SentencePieceProcessor(str(file))
    kinds = (
        (model.is_unknown, 2),
        (model.is_control, 3),
        (model.is_unused, 5),
        (model.is_byte, 6),
        (lambda _: True, 1),
    )
    vocabulary = {
        "tokens": [model.id_to_piece(token) for token in range(len(model))],
        "scores": [model.get_score(token) for token in range(len(model))],
        "types": [next(kind for is_kind, kind in kinds if is_kind(token)) for token in range(len(model))],
    }
    return vocabulary, model.encode


def _tiktoken(
    ranks: dict[bytes, int], pattern: str, prepare: Callable[[str], str] = str
) -> tuple[dict[str, Any], Encode]:
    import tiktoken

    encoding = tiktoken.Encoding("published", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    in_order = sorted(ranks, key=ranks.__getitem__)
    parts = (_parts(token, ranks) for token in in_order if len(token) > 1)
    vocabulary = {
        "tokens": [_printable(token) for token in in_order],
        "merges": [" ".join(map(_printable, pair)) for pair in parts if len(pair) == 2],
    }
    return vocabulary, lambda text: encoding.encode_ordinary(prepare(text))


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What `token` consists of when all merges before its own are done: two, or more if none leads to it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1))
        if rank >= ranks[token]:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _printable(token: bytes) -> str:
    return "".join(_STAND_INS[byte] for byte in token)


def _stand_ins() -> list[str]:
    """GPT-2's character for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


_STAND_INS = _stand_ins()


def _ranks(file: Path) -> dict[bytes, int]:
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _folder(package: str) -> Path:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


ENCODERS: dict[str, Callable[..., tuple[dict[str, Any], Encode]]] = {
    "openvino": openvino,
    "llama-bpe": llama_bpe,
    "llama4": llama4,
    "qwen2": qwen2,
    "tekken": tekken,
    "llama": llama,
}


def main() -> None:
    """Serve one encoder until stdin ends."""
    # Libraries print to stdout; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, *arguments = sys.argv[1:]
    vocabulary, encode = ENCODERS[name](*arguments)
    print(json.dumps(vocabulary), file=answers)
    for line in sys.stdin:
        print(json.dumps([encode(text) for text in json.loads(line)]), file=answers)


if __name__ == "__main__":
    main()
