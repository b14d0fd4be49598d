"""A request under way, and what it takes to start it again where its engine has died."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from engine_actor.request import Output, Request


@dataclass(eq=False)
class Flight:
    """One request under way: what it would take to start it again elsewhere."""

    request: Request
    sequence: int
    outputs: asyncio.Queue[tuple[int, Output]]
    tokens: list[int] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    """Of the engines that have computed `tokens`, then of the one it was placed on last."""
    last_token: float | None = None
    """When the last of `tokens` came."""
    resumes: int = 0
    earlier_preemptions: int = 0
    """On engines that died."""
    preemptions: int = 0
    cached_tokens: int | None = None
    """What the first engine to answer found computed."""
    over: bool = False
    """Ended, or nobody wants it any more."""
    stream: int = 0
    """The connection's when this was sent last; 0: not sent."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """A token, its end, or the death of its engine has come since this was last cleared."""

    @property
    def fingerprint(self) -> str | None:
        """Of the engine that computed the newest of `tokens`; None while there are none."""
        return self.fingerprints[-1] if self.tokens else None

    def place(self, fingerprint: str) -> bool:
        """Note that an engine of this fingerprint goes on; False: its bits may differ from those so far."""
        if not self.tokens:
            self.fingerprints.clear()
        alike = not self.fingerprints or self.fingerprints[-1] == fingerprint
        if fingerprint not in self.fingerprints:
            self.fingerprints.append(fingerprint)
        return alike

    def push(self, output: Output) -> None:
        if output.sampled is not None:
            self.tokens.append(output.sampled.token)
            self.last_token = time.monotonic()
        self.over = output.finish_reason is not None
        self.preemptions = self.earlier_preemptions + output.num_preemptions
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        self.outputs.put_nowait(
            (
                self.sequence,
                replace(output, num_preemptions=self.preemptions, cached_tokens=self.cached_tokens),
            )
        )
        self.moved.set()

    def fail(self, reason: str) -> None:
        """End it with an error."""
        self.push(Output(self.request.id, len(self.tokens), None, "error", reason))

    def resumed(self) -> Request:
        """The request that continues after the tokens received so far."""
        self.earlier_preemptions = self.preemptions
        params = self.request.params
        if self.tokens and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(self.request, params=params, resumed=list(self.tokens), last_token=self.last_token)
