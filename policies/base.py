"""The one protocol every policy speaks. A policy owns the waiting queue and nothing else.

The scheduler asks *who*: who is next, who yields. It decides *whether* by itself: slots, KV budget
and token budget are not a policy's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Schedulable(Protocol):
    """What a policy may read of a request."""

    @property
    def id(self) -> str: ...
    @property
    def arrival(self) -> float: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...


class Policy(Protocol):
    """Admission order, and whom to preempt. Called from the step thread only."""

    name: str
    gang: bool
    """True: slots come back, and requests are admitted, only when the whole batch is done."""

    def enqueue(self, request: Schedulable, now: float) -> None:
        """Let a new or a preempted request wait."""
        ...

    def withdraw(self, request: Schedulable) -> None:
        """Forget a waiting request: it was aborted."""
        ...

    def peek(self, now: float) -> Schedulable | None:
        """The request to admit next; None when nobody waits."""
        ...

    def admit(self, request: Schedulable, now: float) -> None:
        """Take `request`, the one `peek` named, out of the queue: it has a slot now."""
        ...

    def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:
        """Account service given in this step. Recomputed tokens are charged to nobody."""
        ...

    def victim(self, running: Sequence[Schedulable], now: float) -> Schedulable:
        """Whom to preempt when KV runs out; `running` is not empty."""
        ...

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Schedulable | None:
        """Who must yield to `waiting`, which is next but lacks a slot or KV; None when nobody must."""
        ...

    def __len__(self) -> int:
        """Requests waiting."""
        ...
