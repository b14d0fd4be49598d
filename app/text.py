"""Text to tokens and back: tokenizer, chat template, incremental decoding, stop strings.

A token is a fixed sequence of bytes, so text is those bytes through an incremental UTF-8 decoder:
linear time, no character is ever split, and the pieces add up to the tokenizer's own full decode.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.files import ModelFiles

SPACE = "▁"
"""SentencePiece's visible space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TemplateError(ValueError):
    """The chat template refuses these messages; the message is the template's own."""


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(
            [*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)]
        )
        self.has_chat_template = bool(tokenizer.chat_template)
        decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
        self._token_bytes = _byte_table(tokenizer, decoder)
        self.strips_first_space = any(d.get("type") == "Strip" for d in decoder.get("decoders", [])) or bool(
            decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme", "always") != "never"
        )

    @classmethod
    def load(cls, files: ModelFiles, cache: Path) -> Tokenizer:
        """Load a model's tokenizer. Reading it out of a GGUF file takes seconds, so it is kept in `cache`.

        Raises OSError or ValueError if the files hold no usable tokenizer.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        folder = files.dir if files.gguf_file is None else _converted(files.dir, files.gguf_file, cache)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not tokenizer.is_fast:
            raise ValueError(f"the tokenizer of {files.name} has no tokenizer.json")
        return cls(tokenizer, _eos_token_ids(tokenizer, files.dir))

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return len(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template. Raises TemplateError."""
        if not self.has_chat_template:
            raise TemplateError("this model has no chat template: use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of all tokens at once."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text. An id beyond the tokenizer's vocabulary adds nothing."""
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def token_text(self, token: int) -> str:
        """A token for display: bytes that are no whole characters are written as `\\xe2`."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")


class Detokenizer:
    """Turns tokens into text one at a time. Text is held back only inside a character.

    `at_start` is False where the tokens continue a prompt: SentencePiece's first space is text then.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, at_start: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = at_start and tokenizer.strips_first_space

    def push(self, token: int) -> str:
        """The characters that `token` completes; often none or one, never half of one."""
        if token in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left of a character that was never completed, as a replacement character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Passes text on until one of the stop strings appears, holding back what might begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str, *, search: bool = True) -> str:
        """Text that is now safe to show. Sets `found` when a stop string appeared; it is not shown.

        With `search` False the text passes, whatever it holds (before min_tokens).
        """
        text = self._held + text
        self._held = ""
        if not search or not self._stops:
            return text
        hits = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            self.found = True
            return text[: min(hits)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text: generation ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


def _converted(folder: Path, gguf_file: str, cache: Path) -> Path:
    """A directory with the GGUF file's tokenizer in transformers' own format."""
    file = folder / gguf_file
    state = file.stat()
    key = hashlib.blake2b(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8)
    target = cache / "tokenizers" / key.hexdigest()
    if not target.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        tokenizer.save_pretrained(scratch)
        try:
            # Whole or not at all: another replica may be doing the same.
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _eos_token_ids(tokenizer: PreTrainedTokenizerFast, folder: Path) -> frozenset[int]:
    """The tokenizer's end-of-sequence token and those that generation_config.json adds."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    generation = folder / "generation_config.json"
    if generation.is_file():
        extra = json.loads(generation.read_text()).get("eos_token_id") or []
        ids |= set(extra) if isinstance(extra, list) else {extra}
    return frozenset(ids)


def _byte_table(tokenizer: PreTrainedTokenizerFast, decoder: dict[str, Any]) -> list[bytes]:
    """What each token id adds to the text, as the tokenizer's decoder would have it.

    Raises ValueError for a decoder that is neither byte-level nor SentencePiece's.
    """
    kinds = {decoder.get("type")} | {d.get("type") for d in decoder.get("decoders", [])}
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif kinds & {"Metaspace", "ByteFallback"}:
        convert = _sentencepiece
    else:
        raise ValueError(f"cannot decode incrementally with a decoder of {sorted(filter(None, kinds))}")
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    table = [b""] * (max(vocabulary, default=-1) + 1)
    for token_id, token in vocabulary.items():
        table[token_id] = added[token_id].encode() if token_id in added else convert(token)
    return table


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else 256 and up in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
