"""What the scheduler's half of an engine asks of the half that computes, and what it gets back.

Plain Python: whoever steps a scheduler on a clock of its own needs neither torch nor a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen. Names and defaults follow OpenAI and vLLM."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    """Alternatives reported per output token (0 to 20); None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token and, when asked for, how likely it was."""

    token: int
    logprob: float | None = None
    """Of the unmodified distribution; None unless asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest alternatives as (token, logprob), best first."""


class Sequenced(Protocol):
    """What computing reads of a request."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def tokens(self) -> list[int]:
        """Prompt, then output so far."""
        ...

    @property
    def prompt_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...


@dataclass(slots=True)
class Work:
    """The tokens `start` .. `start + count` of one sequence, to be computed in `slot`.

    The slot holds the keys and values of all tokens before `start`. Work that reaches the end of the
    sequence samples its next token.
    """

    sequence: Sequenced
    slot: int
    start: int
    count: int
    scored: range = range(0)
    """Positions whose logits say how likely the next token of the prompt was."""
    idle: bool = False
    """Computed like any other row, logits included, and nobody reads it: nothing is sampled."""

    @property
    def samples(self) -> bool:
        """Whether a token comes of it."""
        return not self.idle and self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Outcome:
    """What came of one Work: a token if it was due one, scores if they were asked for, or an error."""

    sampled: Sampled | None = None
    scores: Sequence[Sampled] = ()
    """Of the tokens after the positions `Work.scored`."""
    error: str | None = None
    """What went wrong with this one alone; it has no token then."""
    forward: int = 0
    """Which of the execution's forwards computed it."""
    computed: bool = True
    """Whether its keys and values are in its slot now."""


Stage = tuple[Literal["forward", "sample"], float]
"""A part of an execution, and the seconds it took."""


@dataclass(slots=True)
class Executed:
    """An execution: one outcome per Work, in order, and what it took."""

    outcomes: list[Outcome]
    stages: list[Stage]
    """What it did, in order: more than one forward where the first failed and was repeated for each request
    alone."""
    forwards: int = 1
    """Forwards that succeeded."""
    rows: int = 0
    """Rows computed for requests."""
    padded_rows: int = 0
    """Rows computed, those included that only filled the batch up."""
    failures: int = 0
    """Forwards that failed, or whose every request did."""


@dataclass(frozen=True, slots=True)
class Move:
    """From now on `slot` holds `length` tokens: the first of those that `source` holds, or of its own."""

    slot: int
    length: int
    source: int | None = None


class DeviceLostError(RuntimeError):
    """The device is of no use any more, and no request is to blame: its engine has to start again."""


class Executor(Protocol):
    """Computes plans over slots. Called from the step thread only."""

    @property
    def num_slots(self) -> int: ...
    @property
    def max_len(self) -> int:
        """Tokens a slot can hold."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def execute(self, works: Sequence[Work]) -> Executed:
        """Compute the works in one forward, each of another slot, and sample.

        What is wrong with one request ends that one, in its outcome, and changes nobody else's bits.
        Raises DeviceLostError.
        """
        ...

    def arrange(self, moves: Sequence[Move]) -> None:
        """Carry out the moves, in order, before the next execution."""
        ...
