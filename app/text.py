"""Tokens to text, one at a time, and the strings that end it.

tokenizers' DecodeStream holds bytes back that never become a character for as long as they come, has no
end at which to give up an unfinished one, and does not tell a token's bytes, which log-probabilities name.
Here a token is a fixed sequence of bytes, and text is those bytes through an incremental UTF-8 decoder:
linear time, no character is ever split, and the pieces add up to the tokenizer's own full decode.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.tokenizer import Tokenizer


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
