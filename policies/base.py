"""The one protocol every policy speaks. A policy owns the waiting queue and nothing else.

The scheduler asks *who*: who is next, who yields. It decides *whether* by itself: slots, KV budget
and token budget are not a policy's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol


class Schedulable(Protocol):
    """What a policy may read of a request."""

    @property
    def id(self) -> str: ...
    @property
    def sequence(self) -> int:
        """Number of the submission, ascending, kept through preemption: breaks every tie."""
        ...

    @property
    def arrival(self) -> float:
        """Seconds of the engine's clock."""
        ...

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        ...

    @property
    def prompt_len(self) -> int: ...


class Policy(ABC):
    """Admission order, and whom to preempt. Called from the step thread only.

    `now` is the engine's clock in seconds. Every method should cost O(running + log waiting) at most.
    """

    name: ClassVar[str]
    insists: ClassVar[bool] = False
    """True: those `displaced` names yield even if the waiting request still does not fit then."""

    @abstractmethod
    def enqueue(self, request: Schedulable, now: float) -> None:
        """Let a new or a preempted request wait."""

    @abstractmethod
    def withdraw(self, request: Schedulable) -> None:
        """Forget a waiting request: it was aborted."""

    @abstractmethod
    def peek(self, now: float) -> Schedulable | None:
        """Name the request to admit next; None when nobody waits."""

    @abstractmethod
    def admit(self, request: Schedulable, now: float) -> None:
        """Take `request`, the one `peek` named, out of the queue: it has a slot now."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many requests wait."""

    def order(self, running: Sequence[Schedulable], now: float) -> list[Schedulable]:
        """Rank `running` (given in order of admission), the most deserving first.

        The first prefills first and is spared when KV runs out; the last yields first. Whoever comes
        first must stay first until it is done, or a pool that is too small never finishes anything.
        """
        return list(running)

    def displaced(
        self, waiting: Schedulable, running: Sequence[Schedulable], now: float
    ) -> Sequence[Schedulable]:
        """Who yields to `waiting`, which is next but lacks a slot or KV: the first to go first.

        The scheduler preempts as few of them as make room, and none if all of them would not.
        """
        return ()

    def charge(self, request: Schedulable, prompt_tokens: int, output_tokens: int) -> None:  # noqa: B027
        """Account service: a prompt at its first admission, each output token as it is sampled.

        Recomputed tokens are charged to nobody.
        """

    def finish(self, request: Schedulable) -> None:  # noqa: B027
        """Forget a running request: it is done, or was aborted."""

    def releases(self, unfinished: int) -> bool:
        """Tell whether finished requests give their slots back; asked while there are any, after each step.

        `unfinished` others are still running. Until the answer is yes, the rows of the finished are computed
        like any others, and nobody reads what comes of them.
        """
        return True

    def capacity(self, kv_tokens: int) -> None:  # noqa: B027
        """Learn, once and before all else, how many tokens the running requests may cache together."""
