"""A GGUF file's tokenizer, built from the file's own fields: vocabulary, merges or scores, pre-tokenizer.

`tokenizer.ggml.pre` names how text is split before merging. The names are llama.cpp's (llama-vocab.cpp);
the patterns are those of each family's own tokenizer.json, which llama.cpp's adapt to its own matcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

VERSION = 1
"""Raise it with every change of what this file builds: kept conversions of an older one are not used."""

SPACE = "▁"
"""SentencePiece's visible space."""


class ConversionError(ValueError):
    """The file's fields do not make a tokenizer; the message names the field and what to do."""


@dataclass(frozen=True, slots=True)
class Split:
    """What happens to text before byte-level BPE merges it."""

    patterns: tuple[str, ...]
    """Each cuts what the one before it left; matches and what lies between them are pieces."""
    whole_words: bool = False
    """A piece that is in the vocabulary as a whole is that token, whatever the merges say."""
    compose: bool = False
    """Combining marks are composed first (NFC)."""
    begins: bool = False
    """A text begins with the bos token, unless the file says otherwise."""


_DIGIT, _TRIPLE = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken(numbers: str) -> str:
    return rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(numbers: str, suffixes: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{suffixes}|{before}{upper}+{lower}*{suffixes}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

_LLAMA3 = Split((_tiktoken(_TRIPLE),), whole_words=True, begins=True)
_BY_NAME: dict[str, Split] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split((_tiktoken(_TRIPLE),))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split((_tiktoken(_DIGIT),), compose=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), Split((_tiktoken(_DIGIT),))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Split((_DIGIT, _GPT2)),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "mellum"),
        Split((_GPT2,)),
    ),
    "qwen35": Split((_QWEN35,), compose=True),
    "tekken": Split((_cased(_DIGIT, ""),), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Split((_cased(_TRIPLE, f"{_SUFFIXES}?"),))),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"), Split((_TRIPLE, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS))
    ),
    "minicpm5": Split((_TRIPLE, _tiktoken(r"\p{N}+")), whole_words=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOS]",
        "[EOT]",
        "</s>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    )
)
"""What families end a turn or a text with, where the file's fields name only one of them."""


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def convert(file: Path, *, backend: Path | None = None) -> tuple[Tokenizer, dict[str, Any]]:
    """A GGUF file's tokenizer and what tokenizer_config.json and generation_config.json would say of it.

    Keys of the second: `chat_template`, `bos_token`, `eos_token`, `unk_token`, `pad_token` where the file
    has them, `add_bos_token`, `add_eos_token`, and `eos_token_id`: every token that ends a generation.
    `backend` is a tokenizer.json to use where the file's own splitting is not known here.
    Raises ConversionError.
    """
    fields = _Fields(file)
    tokens = _Tokens(fields)
    try:
        built = _byte_level(fields, tokens) if fields.model == "gpt2" else _sentencepiece(fields, tokens)
    except ConversionError as error:
        if backend is None:
            raise ConversionError(f"{error}: place the model's tokenizer.json beside {file.name}") from None
        built = Tokenizer.from_file(str(backend))
    return built, _config(fields, tokens)


class _Fields:
    """The `tokenizer.` metadata of a GGUF file."""

    def __init__(self, file: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(file)
        except (ValueError, IndexError) as error:
            raise ConversionError(f"{file.name} is not a readable GGUF file: {error}") from error
        self.model = str(self.get("model", "none"))
        self.pre = str(self.get("pre", "default"))

    def get(self, name: str, default: Any) -> Any:  # noqa: ANN401
        found = self._reader.get_field(f"tokenizer.ggml.{name}")
        return default if found is None else found.contents()

    @property
    def chat_template(self) -> str | None:
        found = self._reader.get_field("tokenizer.chat_template")
        return None if found is None else str(found.contents())


class _Tokens:
    """The vocabulary, and which of it is special. Raises ConversionError if a token stands there twice."""

    def __init__(self, fields: _Fields) -> None:
        self.texts: list[str] = [
            text or f"[EMPTY_{index}]" for index, text in enumerate(fields.get("tokens", []))
        ]
        if not self.texts:
            raise ConversionError("the GGUF file has no tokens (tokenizer.ggml.tokens)")
        self.ids = {text: index for index, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for index, text in enumerate(self.texts) if self.ids[text] != index)
            raise ConversionError(f"the GGUF file has the token {twice!r} twice")
        self.types: Sequence[int] = fields.get("token_type", []) or [_Type.NORMAL] * len(self.texts)
        # SentencePiece's own defaults, which converters leave out.
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if fields.model == "llama" else {}
        self.roles: dict[str, int] = {}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token = int(fields.get(f"{role}_token_id", defaults.get(role, -1)))
            if 0 <= token < len(self.texts):
                self.roles[role] = token

    def of(self, *types: _Type) -> Iterator[int]:
        return (token for token, kind in enumerate(self.types) if kind in types)

    def text(self, role: str) -> str | None:
        return self.texts[self.roles[role]] if role in self.roles else None

    @property
    def ends(self) -> list[int]:
        """Every token that ends a generation."""
        named = {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        marked = self.of(_Type.CONTROL, _Type.USER_DEFINED)
        return sorted(named | {token for token in marked if self.texts[token] in _ENDS})


def _byte_level(fields: _Fields, tokens: _Tokens) -> Tokenizer:
    split = _BY_NAME.get(fields.pre)
    if split is None:
        raise ConversionError(f"the pre-tokenizer {fields.pre!r} of the GGUF file is not known")
    merges = [merge.split(" ", 1) for merge in fields.get("merges", [])]
    if strange := next((merge for merge in merges if "".join(merge) not in tokens.ids), None):
        raise ConversionError(f"the GGUF file merges {' and '.join(strange)!r} into what is no token")
    built = Tokenizer(
        models.BPE(
            vocab=tokens.ids,
            merges=[(left, right) for left, right in merges],
            ignore_merges=split.whole_words,
        )
    )
    if split.compose:
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    return _finished(built, tokens)


def _sentencepiece(fields: _Fields, tokens: _Tokens) -> Tokenizer:
    if fields.model != "llama":
        raise ConversionError(f"the tokenizer model {fields.model!r} of the GGUF file is not supported")
    prefix = fields.get("add_space_prefix", True)
    built = Tokenizer(
        models.BPE(
            vocab=tokens.ids,
            merges=_merges(tokens, fields.get("scores", [])),
            unk_token=tokens.text("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*spaced, normalizers.Replace(" ", SPACE)])
    stripped: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return _finished(built, tokens)


def _merges(tokens: _Tokens, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make one piece of two others, best score first: SentencePiece's order of merging."""
    if len(scores) < len(tokens.texts):
        raise ConversionError("the GGUF file has no score for each token (tokenizer.ggml.scores)")
    # What is matched as a whole, before merging, is not merged from parts.
    pieces = {tokens.texts[token]: token for token in tokens.of(_Type.NORMAL)}
    ways = [
        (-scores[token], token, pieces[left], pieces[right])
        for piece, token in pieces.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    return [(tokens.texts[left], tokens.texts[right]) for _, _, left, right in sorted(ways)]


def _finished(built: Tokenizer, tokens: _Tokens) -> Tokenizer:
    special = tokens.of(_Type.CONTROL, _Type.UNKNOWN)
    built.add_special_tokens([AddedToken(tokens.texts[token], normalized=False) for token in special])
    defined = tokens.of(_Type.USER_DEFINED)
    built.add_tokens([AddedToken(tokens.texts[token], normalized=False) for token in defined])
    return built


def _config(fields: _Fields, tokens: _Tokens) -> dict[str, Any]:
    split = _BY_NAME.get(fields.pre)
    begins = fields.model == "llama" or (split is not None and split.begins)
    named = {
        "chat_template": fields.chat_template,
        "bos_token": tokens.text("bos"),
        "eos_token": tokens.text("eos"),
        "unk_token": tokens.text("unknown"),
        "pad_token": tokens.text("padding"),
    }
    config: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    for role, default in (("bos", begins and "bos_token" in config), ("eos", False)):
        config[f"add_{role}_token"] = bool(fields.get(f"add_{role}_token", default))
        if config[f"add_{role}_token"] and f"{role}_token" not in config:
            raise ConversionError(f"the GGUF file has tokenizer.ggml.add_{role}_token, but no {role} token")
    return config | {"eos_token_id": tokens.ends}
