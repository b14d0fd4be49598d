"""A request from submission to its last token: what the engine keeps per request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from model.executor import Sampled, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

PreemptReason = Literal["kv", "displaced"]
"""`kv`: the KV budget ran out. `displaced`: another request, by the policy more deserving, needed room."""

NO_SLOT = -1


class Phase(enum.StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to complete. Times are seconds of the engine's clock (`time.monotonic` when served).

    `resumed` holds output tokens that another engine already produced: they are prefilled like a
    prompt, and the next token is the one that would have come.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    tenant: str = "default"
    priority: int = 0
    cache_salt: str = ""
    """Only requests of the same salt share prefixes (vLLM's field)."""
    arrival: float = 0.0
    """When the request reached the HTTP layer: TTFT counts from here, queue wait included."""
    resumed: list[int] = field(default_factory=list)
    last_token: float | None = None
    """When the last of `resumed` came: the gap to the next token counts from here."""
    trace_context: dict[str, str] = field(default_factory=dict)
    """W3C `traceparent` (and `tracestate`) of the span that this request's spans belong under."""

    tokens: list[int] = field(init=False)
    """Prompt, then output so far: all that recompute needs."""
    prompt_len: int = field(init=False)
    phase: Phase = Phase.WAITING
    sequence: int = 0
    """Number of the submission, given by the engine; breaks ties between equal arrivals."""
    slot: int = NO_SLOT
    computed: int = 0
    """Leading tokens whose keys and values are in the slot."""
    queued: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens prefilled more than once because a preemption forgot them."""
    forgotten: int = 0
    """Tokens that were computed when it was last preempted."""
    cached_tokens: int = 0
    """Tokens that it found computed when it was first admitted."""
    block_keys: list[int] = field(default_factory=list)
    """See engine_actor/prefixes.py."""
    prompt_scores: list[Sampled] = field(default_factory=list)
    """Log-probabilities of prompt tokens 1.. when asked for."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.tokens = [*self.prompt, *self.resumed]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def max_tokens_total(self) -> int:
        """Most tokens the sequence can reach: prompt + max_tokens."""
        return self.prompt_len + self.params.max_tokens

    def stop_reason(self) -> FinishReason | None:
        """Why the newest token is the last one, if it is."""
        newest, params = self.tokens[-1], self.params
        if self.num_output > params.min_tokens:
            if newest in params.stop_token_ids:
                return "stop"
            if newest in self.eos_token_ids and not params.ignore_eos:
                return "stop"
        return "length" if self.num_output >= params.max_tokens else None


@dataclass(frozen=True, slots=True)
class Output:
    """What one step has to say about one request: a token, an ending, or both."""

    request_id: str
    index: int
    """Output index of `sampled`; the number of output tokens where there is none."""
    sampled: Sampled | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_scores: tuple[Sampled, ...] = ()
    """Sent once, with the first token."""
    num_preemptions: int = 0
    """Of the request, so far."""
    cached_tokens: int = 0
    """Prompt tokens of the request that need not be computed."""
