"""Special tokens and text that only looks like them are told apart.

Written by a chat template, `<|im_end|>` ends a turn; written by a user, it is nine characters of text.
The backend splits special tokens into plain characters. Those that are meant are spelled differently: as
a string which nobody can write, known to the backend as an added token beside the vocabulary.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Characters that Unicode keeps for a program's internal use."""


class SpecialTokens:
    """Encodes with a backend whose special tokens are text unless they are `meant`."""

    def __init__(self, backend: Tokenizer) -> None:
        """The backend is changed: it splits special tokens from here on."""
        added = backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self._backend = backend
        nonce = secrets.token_hex(8)
        self._stand_ins = {
            token.content: f"{_BEGIN}{nonce}.{token_id}{_END}" for token_id, token in special.items()
        }
        # Its neighbours see a stand-in treat spaces as the token itself does.
        backend.add_tokens(
            [
                AddedToken(
                    self._stand_ins[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for token in special.values()
            ]
        )
        backend.encode_special_tokens = True
        self._meant_by = {backend.token_to_id(self._stand_ins[t.content]): i for i, t in special.items()}
        # Where several begin, the longest is meant, as in the backend.
        longest_first = sorted(special.values(), key=lambda token: len(token.content), reverse=True)
        any_of = "|".join(map(_pattern, longest_first)) or "(?!)"
        self._special = re.compile(any_of)
        first = "".join({re.escape(content[0]) for content in self._stand_ins}) or "a"
        self._begins = re.compile(f"(?=[{first}])(?=(?:{any_of}))(.)", re.DOTALL)
        self._hidden = re.compile(f"{_BEGIN}{nonce}x([0-9a-f]+){_END}")
        self._hide_as = f"{_BEGIN}{nonce}x{{:x}}{_END}"

    def meant(self, text: str) -> str:
        """`text` with its special tokens spelled so that they are encoded as such."""
        return self._special.sub(lambda found: self._stand_ins[found[0]], text)

    def hide(self, value: Any) -> Any:  # noqa: ANN401
        """What users wrote, in strings, lists and dicts, so that `meant` finds no special token in it."""
        if isinstance(value, str):
            if self._special.search(value) is None:
                return value
            return self._begins.sub(lambda found: self._hide_as.format(ord(found[1])), value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def shown(self, text: str) -> str:
        """Undoes `hide`."""
        return self._hidden.sub(lambda found: chr(int(found[1], 16)), text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which those special tokens are special that were `meant`."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._meant_by.get(token, token) for token in ids]


def _pattern(token: AddedToken) -> str:
    pattern = re.escape(token.content)
    return rf"(?<!\w){pattern}(?!\w)" if token.single_word else pattern
