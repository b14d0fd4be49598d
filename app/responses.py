"""From the engine's outputs to OpenAI's choices: text, log-probabilities, finish reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.envelope import finite
from app.text import Detokenizer, StopStrings
from app.tokenizer import Tokenizer
from engine_actor.request import Output
from model.executor import Sampled


@dataclass(frozen=True, slots=True)
class Token:
    """An output token and where its text begins, in characters."""

    sampled: Sampled
    offset: int


@dataclass(slots=True)
class Piece:
    """What one output adds to a choice. Text and tokens may be empty: they are held back."""

    text: str
    tokens: list[Token]
    finish_reason: str | None = None


class Choice:
    """One sequence on its way to the client. `offset`: characters already shown, such as an echoed prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, at_start=False)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._decoded = self._shown = offset
        self._held: list[Token] = []
        self.num_tokens = 0
        self._logprob = 0.0

    @property
    def mean_logprob(self) -> float:
        """Of its tokens so far, where the engine was asked for their log-probabilities."""
        return self._logprob / max(1, self.num_tokens)

    def push(self, output: Output) -> Piece:
        """Take an output in. A piece with a finish reason is the last one."""
        text = ""
        if output.sampled is not None:
            self.num_tokens += 1
            self._logprob += output.sampled.logprob or 0.0
            # The token that ends a sequence, by itself or by request, is no part of the answer.
            if output.finish_reason != "stop":
                self._held.append(Token(output.sampled, self._decoded))
                text = self._detokenizer.push(output.sampled.token)
        ended = output.finish_reason is not None
        if ended:
            text += self._detokenizer.flush()
        self._decoded += len(text)
        shown = self._stops.push(text, search=self.num_tokens > self._min_tokens)
        if self._stops.found:
            self._shown += len(shown)
            return Piece(shown, [token for token in self._held if token.offset < self._shown], "stop")
        if ended:
            return Piece(shown + self._stops.flush(), self._held, output.finish_reason)
        self._shown += len(shown)
        released = [token for token in self._held if token.offset < self._shown]
        self._held = self._held[len(released) :]
        return Piece(shown, released)


@dataclass(slots=True)
class Answer:
    """A whole choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_scores: tuple[Sampled, ...] = ()

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {
            **entry(token.sampled.token, token.sampled.logprob),
            "top_logprobs": [entry(*alternative) for alternative in token.sampled.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    """The `logprobs` object of a completions choice. A first prompt token has no log-probability."""

    def text(token: int) -> str:
        shown = tokenizer.token_text(token)
        whole = shown.encode() == tokenizer.token_bytes(token)
        return shown if whole else f"bytes:{shown}"

    def top(sampled: Sampled) -> dict[str, float | None] | None:
        if sampled.logprob is None:
            return None
        likeliest = {text(token): finite(logprob) for token, logprob in sampled.top}
        return likeliest | {text(sampled.token): finite(sampled.logprob)}

    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [finite(token.sampled.logprob) for token in tokens],
        "tokens": [text(token.sampled.token) for token in tokens],
        "top_logprobs": [top(token.sampled) for token in tokens],
    }


def echoed_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[Sampled], top: int
) -> list[Token]:
    """The prompt's tokens as if they were output, with `top` alternatives each; the first has no score."""
    detokenizer = Detokenizer(tokenizer)
    offset = 0
    tokens = []
    for token, sampled in zip(prompt, [Sampled(prompt[0]), *scores], strict=True):
        tokens.append(Token(_cut(sampled, top), offset))
        offset += len(detokenizer.push(token))
    return tokens


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[Sampled], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then token ids to their log-probability.

    Each position lists its own token and the `top` likeliest.
    """

    def entry(token: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    listed: list[dict[str, dict[str, Any]] | None] = [None]
    for sampled in (_cut(score, top) for score in scores):
        ranks = {token: rank for rank, (token, _) in enumerate(sampled.top, start=1)}
        own = {str(sampled.token): entry(sampled.token, sampled.logprob, ranks.get(sampled.token))}
        likeliest = {str(token): entry(token, logprob, ranks[token]) for token, logprob in sampled.top}
        listed.append(own | likeliest)
    return listed


def _cut(sampled: Sampled, top: int) -> Sampled:
    # One scoring serves `logprobs` with echo and `prompt_logprobs`: it has as many as the larger wants.
    return replace(sampled, top=sampled.top[:top])
