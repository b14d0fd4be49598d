"""A model's tokenizer: text and conversations to tokens, tokens to bytes."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from app.chat_template import ChatTemplate, TemplateError, read_chat_template
from app.gguf_tokenizer import SPACE, VERSION, convert
from app.special_tokens import SpecialTokens
from app.text import Detokenizer
from model.files import ModelFiles

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes for one model, and knows the bytes of each token. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        named: Mapping[str, str],
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
    ) -> None:
        """`named` are special tokens by name (`eos_token`); the one of that name ends a generation too.

        Raises ValueError for a decoder that is neither byte-level nor SentencePiece's.
        """
        backend.no_truncation()
        backend.no_padding()
        backend = _with_special(backend, named.values())
        self._named, self._template = named, template
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.strips_first_space = any(d.get("type") == "Strip" for d in decoder.get("decoders", [])) or bool(
            decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme", "always") != "never"
        )
        self._token_bytes = _byte_table(backend, decoder)
        ends = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        self.eos_token_ids = eos_token_ids | ({ends} if ends is not None else frozenset())
        self._special = SpecialTokens(backend)

    @classmethod
    def load(cls, files: ModelFiles, cache: Path) -> Tokenizer:
        """Load a model's tokenizer. Reading it out of a GGUF file takes seconds, so it is kept in `cache`.

        Raises OSError or ValueError if the files hold no usable tokenizer.
        """
        folder = files.dir if files.gguf_file is None else _converted(files.dir / files.gguf_file, cache)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"the tokenizer of {files.name} has no tokenizer.json")
        config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        texts = {name: config[name] for name in _NAMED if config.get(name)}
        named = {name: text["content"] if isinstance(text, dict) else text for name, text in texts.items()}
        ends = _json(folder / "generation_config.json").get("eos_token_id") or []
        return cls(
            _with_ends(Backend.from_file(str(file)), named, config),
            named,
            eos_token_ids=frozenset(ends if isinstance(ends, list) else [ends]),
            template=read_chat_template(folder, config, named),
        )

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return len(self._token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def info(self) -> dict[str, str]:
        """What tokenizer_config.json would say: special tokens by name, and the chat template."""
        template = {"chat_template": self._template.source} if self._template else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._named, **template}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        With `parse_special`, special tokens written out in it are recognised; else they are text.
        `add_special_tokens` puts those around it that the model expects around a text.
        """
        text = self._special.meant(text) if parse_special else text
        return self._special.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template. Raises TemplateError.

        Special tokens are those that the template writes; in messages and `variables` they are text.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        rendered = self._template.render(
            [self._special.hide(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._special.hide(variables or {}),
        )
        text = self._special.shown(self._special.meant(rendered))
        return self._special.encode(text, add_special_tokens=False)

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


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def _converted(file: Path, cache: Path) -> Path:
    """A directory with a GGUF file's tokenizer in Hugging Face's layout."""
    beside = file.parent / "tokenizer.json"
    sources = [file, *([beside] if beside.is_file() else [])]
    states = [(str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    key = hashlib.blake2b(repr((VERSION, states)).encode(), digest_size=8).hexdigest()
    target = cache / "tokenizers" / key
    if not target.is_dir():
        backend, config = convert(file, backend=beside if beside.is_file() else None)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        backend.save(str(scratch / "tokenizer.json"), pretty=False)
        (scratch / "generation_config.json").write_text(
            json.dumps({"eos_token_id": config.pop("eos_token_id")})
        )
        (scratch / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            # Whole or not at all: another replica may be doing the same.
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _with_ends(backend: Backend, named: Mapping[str, str], config: Mapping[str, Any]) -> Backend:
    """The backend, adding around a text what tokenizer_config.json says, if it says so."""
    if not {"add_bos_token", "add_eos_token"} & config.keys():
        return backend
    empty = backend.encode("").tokens
    around = {}
    for role in ("bos", "eos"):
        text = named.get(f"{role}_token")
        if text is not None and config.get(f"add_{role}_token", text in empty):
            around[role] = text
    backend.post_processor = processors.TemplateProcessing(
        single=[text for text in (around.get("bos"), "$A", around.get("eos")) if text is not None],
        special_tokens=[(text, backend.token_to_id(text)) for text in around.values()],
    )
    return backend


def _with_special(backend: Backend, texts: Collection[str]) -> Backend:
    """The backend, with these tokens special although tokenizer.json has them as ordinary added ones."""
    added = backend.get_added_tokens_decoder().values()
    if all(token.special for token in added if token.content in texts):
        return backend
    written = json.loads(backend.to_str())
    for token in written["added_tokens"]:
        token["special"] |= token["content"] in texts
    return Backend.from_str(json.dumps(written))


def _byte_table(backend: Backend, decoder: dict[str, Any]) -> list[bytes]:
    """What each token id adds to the text, as the backend's decoder would have it.

    Raises ValueError for a decoder that is neither byte-level nor SentencePiece's.
    """
    kinds = {decoder.get("type")} | {d.get("type") for d in decoder.get("decoders", [])}
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif kinds & {"Metaspace", "ByteFallback"}:
        convert = _sentencepiece
    else:
        raise ValueError(f"cannot decode incrementally with a decoder of {sorted(filter(None, kinds))}")
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    vocabulary = {token_id: token for token, token_id in backend.get_vocab().items()}
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
