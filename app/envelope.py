"""What every object of one response repeats, its usage, and how a stream carries it."""

from __future__ import annotations

import json
import math
import secrets
import time
from typing import Any, Literal


class Usage:
    """Token counts of one response."""

    def __init__(self, prompt_tokens: int, *, include_preemptions: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.preemptions: dict[int, int] = {}
        self.cached_tokens: dict[int, int] = {}
        """By prompt: the fewest that any of its choices found computed."""
        self._include_preemptions = include_preemptions

    def body(self) -> dict[str, Any]:
        """The `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }
        if self._include_preemptions:
            usage["completion_tokens_details"] = {"num_preemptions": sum(self.preemptions.values())}
        return usage


class Envelope:
    """What every object of one response repeats: id, time, model."""

    def __init__(self, kind: Literal["chat", "completion"], model: str) -> None:
        self.chat = kind == "chat"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model

    def body(self, choices: list[dict[str, Any]], fingerprint: str, *, chunk: bool) -> dict[str, Any]:
        """The response, or one chunk of it, without usage."""
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint,
            "choices": choices,
        }


_LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON leaves as they are and at which many a client's line reader splits an event."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    text = _encode(body)
    for character, escaped in _LINE_SEPARATORS.items():
        text = text.replace(character, escaped)
    return b"data: " + text.encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events skip."""


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can hold it; OpenAI's -9999.0 stands for impossible."""
    if logprob is None or not math.isfinite(logprob):
        return None if logprob is None else -9999.0
    return logprob
