"""One streamed completion (OpenAI's SSE) as it arrives: its text and the time of each token."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionStream:
    """Feed it lines. It never raises: what is wrong with a stream is in `error`."""

    token_times: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Where the server sends them."""
    error: str | None = None
    done: bool = False

    def feed(self, line: str, now: float) -> None:
        """Take a line of the body, received at `now`."""
        if not line.startswith("data:"):
            return
        payload = line[5:].strip()
        if payload == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            self.error = f"not JSON: {payload[:80]!r}"
            return
        if "error" in event:
            error = event["error"]
            self.error = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            return
        text = ""
        for choice in event.get("choices", ()):
            text += choice.get("text") or ""
            self.token_ids += choice.get("token_ids") or ()
        self.text += text
        self._count(event.get("usage"), text, now)

    def end(self, expected_tokens: int) -> None:
        """The body ended: say so if that was too early."""
        if self.error is None and not self.done:
            self.error = f"the stream broke off after {len(self.token_times)} of {expected_tokens} tokens"
        elif self.error is None and len(self.token_times) != expected_tokens:
            self.error = f"{len(self.token_times)} tokens instead of {expected_tokens}"

    def _count(self, usage: object, text: str, now: float) -> None:
        # A chunk may carry several tokens, or none yet of a character that is not whole; usage tells.
        # Servers without continuous usage count a token per chunk with text; their last usage corrects it.
        if isinstance(usage, dict):
            total = int(usage.get("completion_tokens") or 0)
            self.token_times += [now] * (total - len(self.token_times))
        elif text:
            self.token_times.append(now)
