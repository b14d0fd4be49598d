"""One HTTP request that generates, from its prompts to the last byte of its response."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api_error import ApiError
from app.envelope import DONE, KEEP_ALIVE, Envelope, Usage, sse
from app.generation import Generation
from app.responses import (
    Answer,
    Choice,
    Piece,
    Token,
    chat_logprobs,
    completion_logprobs,
    echoed_tokens,
    prompt_logprobs,
)
from app.schemas import ChatRequest, CompletionRequest
from app.tokenizer import Tokenizer
from app.tracing import RequestTrace
from engine_actor.request import Output


class Job:
    """One HTTP request that generates: its prompts, its sequences, and what they have said so far.

    Sequence `p * n + c` is choice c of prompt p, and the response's choice of that index. With `best_of` a
    prompt has so many sequences, and the best of them become its choices.
    """

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        envelope: Envelope,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        trace: RequestTrace,
    ) -> None:
        self.body = body
        self.trace = trace
        self.envelope = envelope
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.usage = Usage(sum(map(len, prompts)), include_preemptions=body.include_preemptions)
        self.echo = isinstance(body, CompletionRequest) and body.echo
        self.silent = self.echo and body.max_tokens == 0
        """Only the prompt is wanted: the one token the engine must produce is not shown."""
        self.echoed = [
            tokenizer.decode(prompt, skip_special_tokens=True) if self.echo else "" for prompt in prompts
        ]
        self.choices = [
            Choice(tokenizer, body.stops, min_tokens=body.min_tokens, offset=len(echoed))
            for echoed in self.echoed
            for _ in range(body.width)
        ]

    def prompt_of(self, sequence: int) -> int:
        """Which prompt a sequence answers."""
        return sequence // self.body.width

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False

    async def pieces(self, generation: Generation) -> AsyncIterator[tuple[int, Piece, Output]]:
        """What each output adds to which choice. Raises ApiError if the engine fails a sequence."""
        async for sequence, output in generation:
            if output.finish_reason in ("error", "abort"):
                raise ApiError(500, output.error or "the engine dropped this request", code="engine_error")
            started = time.perf_counter()
            piece = self.choices[sequence].push(output)
            seconds = time.perf_counter() - started
            self.trace.detokenized(sequence, output, piece.finish_reason, seconds)
            if self.silent:
                piece = Piece("", [], output.finish_reason)
            elif output.sampled is not None:
                self.usage.completion_tokens += 1
            self.usage.preemptions[sequence] = output.num_preemptions
            cached = self.usage.cached_tokens
            prompt = self.prompt_of(sequence)
            cached[prompt] = min(output.cached_tokens, cached.get(prompt, output.cached_tokens))
            if piece.finish_reason is not None and output.finish_reason is None:
                generation.end(sequence)
            yield sequence, piece, output

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole response."""
        answers = [Answer() for _ in self.choices]
        async for sequence, piece, output in self.pieces(generation):
            answers[sequence].prompt_scores += output.prompt_scores
            answers[sequence].add(piece)
        kept = self._best()
        choices = [self._whole(index, sequence, answers[sequence]) for index, sequence in enumerate(kept)]
        body = self.envelope.body(choices, generation.fingerprint, chunk=False) | {"usage": self.usage.body()}
        if self.body.prompt_logprobs is not None:
            top = self.body.prompt_logprobs
            scores = [
                prompt_logprobs(self.tokenizer, answer.prompt_scores, top)
                for answer in (answers[sequence] for sequence in kept)
            ]
            if isinstance(self.body, ChatRequest):
                body["prompt_logprobs"] = scores[0]
            else:
                for choice, score in zip(choices, scores, strict=True):
                    choice["prompt_logprobs"] = score
        return body

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The response as server-sent events, `data: [DONE]` last; an error ends it early."""
        options = self.body.stream_options
        include_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats

        def event(choices: list[dict[str, Any]], *, last: bool = False) -> bytes:
            body = self.envelope.body(choices, generation.fingerprint, chunk=True)
            if continuous or last:
                body["usage"] = self.usage.body()
            elif include_usage:
                body["usage"] = None
            return sse(body)

        try:
            for choice in self._openings():
                yield event([choice])
            async for sequence, piece, output in self.pieces(generation):
                for choice in self._chunks(sequence, piece, output):
                    yield event([choice])
            if include_usage:
                yield event([], last=True)
            yield DONE
        except ApiError as error:
            self.trace.fail(error.code or str(error.status))
            yield sse(error.body())

    def _best(self) -> list[int]:
        """The sequences that are returned: the likeliest by token of each prompt's, the best one first."""
        n, width = self.body.n, self.body.width
        if n == width:
            return list(range(len(self.choices)))
        kept = []
        for first in range(0, len(self.choices), width):
            ranked = sorted(range(first, first + width), key=lambda i: -self.choices[i].mean_logprob)
            kept += ranked[:n]
        return kept

    def _whole(self, index: int, sequence: int, answer: Answer) -> dict[str, Any]:
        prompt = self.prompt_of(sequence)
        if isinstance(self.body, ChatRequest):
            logprobs = chat_logprobs(self.tokenizer, answer.tokens) if self.wants_logprobs else None
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.text,
                "refusal": None,
                "annotations": [],
            }
            choice = {"index": index, "message": message, "logprobs": logprobs}
        else:
            tokens = self._with_echo(sequence, answer.tokens, answer.prompt_scores)
            logprobs = completion_logprobs(self.tokenizer, tokens) if self.wants_logprobs else None
            choice = {"text": self.echoed[prompt] + answer.text, "index": index, "logprobs": logprobs}
        choice["finish_reason"] = answer.finish_reason
        return choice

    def _openings(self) -> list[dict[str, Any]]:
        """What a chat stream says before the first token: each choice's role."""
        if not isinstance(self.body, ChatRequest):
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(len(self.choices))
        ]

    def _chunks(self, sequence: int, piece: Piece, output: Output) -> list[dict[str, Any]]:
        """The chunks of one piece; none while it is all held back."""
        if isinstance(self.body, ChatRequest):
            chunks = []
            if piece.text or piece.tokens:
                logprobs = chat_logprobs(self.tokenizer, piece.tokens) if self.wants_logprobs else None
                chunks.append(_delta(sequence, {"content": piece.text}, logprobs, None))
            if piece.finish_reason is not None:
                chunks.append(_delta(sequence, {}, None, piece.finish_reason))
            return chunks
        text, tokens = piece.text, piece.tokens
        if output.index == 0 and self.echo:
            text = self.echoed[self.prompt_of(sequence)] + text
            tokens = self._with_echo(sequence, tokens, output.prompt_scores)
        if not (text or tokens or piece.finish_reason):
            return []
        logprobs = completion_logprobs(self.tokenizer, tokens) if self.wants_logprobs else None
        return [{"text": text, "index": sequence, "logprobs": logprobs, "finish_reason": piece.finish_reason}]

    def _with_echo(self, sequence: int, tokens: list[Token], scores: Sequence[Any]) -> list[Token]:
        if not (self.echo and self.wants_logprobs):
            return tokens
        prompt = self.prompts[self.prompt_of(sequence)]
        return echoed_tokens(self.tokenizer, prompt, scores, self.body.logprobs or 0) + tokens


class EventStream(StreamingResponse):
    """Server-sent events that drop their generation however the connection ends.

    While there is nothing to say, a comment says so every `keep_alive_seconds`: proxies cut silent streams.
    """

    def __init__(
        self, job: Job, generation: Generation, headers: Mapping[str, str], keep_alive_seconds: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(job.events(generation), media_type="text/event-stream", headers=headers)
        self._generation = generation
        self._keep_alive_seconds = keep_alive_seconds
        self._spoke = math.inf
        """When something was sent last; before the first byte and after the last, never."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response. The generator's own `finally` would not run if it had never been started."""

        async def speak(message: Message) -> None:
            self._spoke = time.monotonic() if message.get("more_body", True) else math.inf
            await send(message)

        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await super().__call__(scope, receive, speak)
        finally:
            keeping_alive.cancel()
            self._generation.close()

    async def _keep_alive(self, send: Send) -> None:
        comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
        # Whoever hung up is noticed by the stream itself.
        with contextlib.suppress(OSError):
            while True:
                silent = time.monotonic() - self._spoke
                if silent >= self._keep_alive_seconds:
                    self._spoke = time.monotonic()
                    await send(comment)
                    silent = 0.0
                await asyncio.sleep(self._keep_alive_seconds - max(0.0, silent))


def _delta(index: int, delta: dict[str, Any], logprobs: object, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
