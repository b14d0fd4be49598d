"""What the core and whatever computes for it tell each other. Plain Python: importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

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
