"""What each route does: validate, tokenize, place, answer. Knows HTTP's rules and the engine's limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from app.api_error import ApiError, hung_up, invalid
from app.body import read_body
from app.chat_template import TemplateError
from app.config import Settings
from app.engine_client import EngineClient, NoEngineError, QueueFullError
from app.envelope import Envelope
from app.job import EventStream, Job
from app.live import EngineView
from app.parsing import Body, IgnoredFields, parse
from app.refusals import Refusals
from app.sampling_defaults import sampling_defaults
from app.schemas import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    TokenizeRequest,
    check_vocabulary,
)
from app.seeds import choice_seed, random_seed
from app.tenants import Tenants
from app.tokenizer import Tokenizer
from app.tracing import trace_of
from engine_actor import request as engine_request
from engine_actor.messages import EngineInfo
from model.files import find_model

OWNER = "slotserve"
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
RETRY_AFTER_SECONDS = 1


class Service:
    """Answers requests, whatever carries them."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        client: EngineClient,
        tenants: Tenants,
        refusals: Refusals,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.client = client
        self.tenants = tenants
        self.refusals = refusals
        self._ignored = IgnoredFields()
        files = find_model(settings.model)
        self.model_name = settings.model_name or files.name
        self._defaults = sampling_defaults(files) if settings.generation_config else {}
        self._created = int((files.dir / (files.gguf_file or "config.json")).stat().st_mtime)
        """When the model was: every replica must say the same."""

    @property
    def info(self) -> EngineInfo:
        """What the engines turned out to be."""
        return self.client.info

    async def chat_completions(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        arrival, tenant = time.monotonic(), self.tenants.of(http.headers)
        body = await self._read(ChatRequest, http)
        self._check(body)
        trace = trace_of(http)
        with trace.span("tokenize"):
            prompt = await self._encode_chat(body)
        asked = body.max_completion_tokens or body.max_tokens
        param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        max_tokens = self._fit("messages", len(prompt), asked, self.info.max_len, param)
        job = Job(body, self._envelope("chat"), self.tokenizer, [prompt], trace)
        wanted = (body.wanted_logprobs, body.prompt_logprobs)
        return await self._run(http, job, [max_tokens], wanted, arrival, tenant)

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        arrival, tenant = time.monotonic(), self.tenants.of(http.headers)
        body = await self._read(CompletionRequest, http)
        self._check(body)
        if len(body.prompts) > self.settings.max_prompts:
            raise invalid(
                f"Invalid 'prompt': {len(body.prompts)} prompts; {self.settings.max_prompts} is the limit",
                "prompt",
            )
        trace = trace_of(http)
        with trace.span("tokenize"):
            prompts = [await self._encode(prompt) for prompt in body.prompts]
        # An echo without output still takes one token, which is not shown.
        asked = body.max_completion_tokens or (None if body.max_tokens is None else max(1, body.max_tokens))
        max_tokens = [self._fit("prompt", len(prompt), asked, COMPLETION_MAX_TOKENS) for prompt in prompts]
        scores = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scores = max(body.logprobs, scores or 0)
        job = Job(body, self._envelope("completion"), self.tokenizer, prompts, trace)
        # Without them nobody could say which answers are best.
        logprobs = 0 if body.logprobs is None and body.width > body.n else body.logprobs
        return await self._run(http, job, max_tokens, (logprobs, scores), arrival, tenant)

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        self.tenants.of(http.headers)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: Request, model_id: str) -> Response:
        """GET /v1/models/{model_id}."""
        self.tenants.of(http.headers)
        self._check_model(model_id)
        return JSONResponse(self._model())

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize, with vLLM's fields."""
        self.tenants.of(http.headers)
        body = await self._read(TokenizeRequest, http)
        self._check_model(body.model)
        if body.messages is not None:
            tokens = await self._encode_chat(body)
        else:
            tokens = await asyncio.to_thread(
                self.tokenizer.encode,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens,
                parse_special=self.settings.special_tokens_in_prompts,
            )
        answer = {"count": len(tokens), "max_model_len": self.info.max_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [self.tokenizer.token_text(token) for token in tokens]
        return JSONResponse(answer, headers=self._ignored.header(body))

    async def tokenizer_info(self, http: Request) -> Response:
        """GET /tokenizer_info, with vLLM's fields."""
        self.tenants.of(http.headers)
        return JSONResponse(self.tokenizer.info)

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize, with vLLM's fields."""
        self.tenants.of(http.headers)
        body = await self._read(DetokenizeRequest, http)
        self._check_model(body.model)
        check_vocabulary(body.tokens, self.info.vocab_size, "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens)})

    def views(self) -> dict[str, EngineView]:
        """The engines as the live page, the trace and the metrics see them."""
        found = self.client.engines()
        return {name: engine for name, (engine, _) in found.items() if isinstance(engine, EngineView)}

    def hello(self) -> dict[str, Any]:
        """What the live page is told first."""
        engines = [
            {"engine": name, "mode": info.mode, "policy": info.policy, "slots": info.slots}
            for name, (_, info) in self.client.engines().items()
        ]
        return {"model": self.model_name, "engines": engines}

    async def health(self) -> Response:
        """GET /health: 200 while an engine is up and none that has work has stopped stepping."""
        engines = self.client.statuses()
        up = [status for status in engines.values() if status is not None]
        healthy = bool(up) and all(status.stalled < self.settings.stall_seconds for status in up)
        described = {
            name: {"state": "down"}
            if status is None
            else {
                "state": "stalled" if status.stalled >= self.settings.stall_seconds else "up",
                "pid": self.client.engines()[name][1].pid,
                "steps": status.steps,
                "running": status.running,
                "waiting": status.waiting,
                "free_kv_tokens": status.free_kv,
            }
            for name, status in engines.items()
        }
        body = {"status": "ok" if healthy else "unhealthy", "engine": self.info.summary, "engines": described}
        if not healthy:
            self.refusals.count(503, "unhealthy")
        return JSONResponse(body, 200 if healthy else 503)

    async def _run(
        self,
        http: Request,
        job: Job,
        max_tokens: Sequence[int],
        wanted: tuple[int | None, int | None],
        arrival: float,
        tenant: str,
    ) -> Response:
        body = job.body.with_defaults(self._defaults)
        seed = random_seed() if body.seed is None else body.seed
        job.trace.describe(
            self.model_name,
            body,
            response_id=job.envelope.id,
            tenant=tenant,
            prompt_tokens=job.usage.prompt_tokens,
            max_tokens=max(max_tokens),
            seed=seed,
        )
        if self.settings.trace_prompts:
            job.trace.reveal([self.tokenizer.decode(prompt) for prompt in job.prompts])
        carrier = job.trace.carrier
        requests = [
            engine_request.Request(
                id=job.envelope.id if len(job.choices) == 1 else f"{job.envelope.id}-{sequence}",
                prompt=job.prompts[job.prompt_of(sequence)],
                params=body.sampling(
                    vocab_size=self.info.vocab_size,
                    max_tokens=max_tokens[job.prompt_of(sequence)],
                    # A seed of the client's is every prompt's; ours must not make equal prompts answer alike.
                    seed=choice_seed(seed, sequence if body.seed is None else sequence % body.width),
                    logprobs=wanted[0],
                    prompt_logprobs=wanted[1],
                ),
                eos_token_ids=self.tokenizer.eos_token_ids | self.info.eos_token_ids,
                tenant=tenant,
                priority=body.priority,
                cache_salt=body.cache_salt or "",
                arrival=arrival,
                trace_context=carrier,
            )
            for sequence in range(len(job.choices))
        ]
        try:
            generation = await self.client.generate(requests)
        except QueueFullError as error:
            raise ApiError(
                429, f"The queue is full: {error}.", code="queue_full", headers=_retry_later()
            ) from None
        except NoEngineError as error:
            raise ApiError(503, f"{error}.", code="engine_unavailable", headers=_retry_later()) from None
        headers = self._ignored.header(body)
        if body.stream:
            return EventStream(job, generation, headers, self.settings.keep_alive_seconds)
        try:
            answer = await _unless_disconnected(http, job.answer(generation))
        finally:
            generation.close()
        return JSONResponse(answer, headers=headers)

    async def _read(self, schema: type[Body], http: Request) -> Body:
        return parse(schema, await read_body(http, self.settings.max_body_bytes))

    def _check(self, body: ChatRequest | CompletionRequest) -> None:
        self._check_model(body.model)
        known = self.settings
        if body.width > known.max_n:
            param = "n" if body.width == body.n else "best_of"
            raise invalid(f"Invalid '{param}': {body.width}, the limit is {known.max_n}", param)
        sequences = body.width * (len(body.prompts) if isinstance(body, CompletionRequest) else 1)
        # Beyond it the queue would be full for this request however empty it is.
        most = known.num_engines * (known.max_num_seqs + known.max_waiting)
        if sequences > most:
            raise invalid(f"Invalid 'n': {sequences} choices in all, but {most} may run or wait", "n")

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            raise ApiError(
                404,
                f"The model `{name}` does not exist: this server has `{self.model_name}`.",
                param="model",
                code="model_not_found",
            )

    def _fit(
        self, param: str, prompt_len: int, asked: int | None, default: int, asked_param: str = "max_tokens"
    ) -> int:
        """Tokens to generate at most. Raises ApiError if prompt and output can never fit."""
        context, largest = self.info.max_len, self.info.largest_request
        if prompt_len + (asked or 1) > context:
            raise invalid(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt_len + (asked or 1)} tokens ({prompt_len} in the {param}, {asked or 1} in the "
                "completion). Please reduce the length of the messages or completion.",
                param,
                "context_length_exceeded",
            )
        if prompt_len + (asked or 1) > largest:
            raise invalid(
                f"{prompt_len} tokens in the {param} + {asked or 1} in the completion is "
                f"{prompt_len + (asked or 1)}, but the KV budget of this server is {largest} tokens.",
                asked_param,
                "kv_budget_exceeded",
            )
        return min(default, largest - prompt_len) if asked is None else asked

    async def _encode_chat(self, body: Conversation) -> list[int]:
        opens = body.add_generation_prompt
        try:
            tokens = await asyncio.to_thread(
                self.tokenizer.encode_chat,
                [message.as_template_input() for message in body.messages or []],
                add_generation_prompt=not body.continue_final_message if opens is None else opens,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        except TemplateError as error:
            raise invalid(f"Invalid 'messages': {error}", "messages") from None
        check_vocabulary(tokens, self.info.vocab_size, "messages")
        return tokens

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            parse_special = self.settings.special_tokens_in_prompts
            prompt = await asyncio.to_thread(self.tokenizer.encode, prompt, parse_special=parse_special)
            if not prompt:
                raise invalid("Invalid 'prompt': it has no tokens", "prompt")
        # Text too: a tokenizer may have more tokens than the model has embeddings.
        check_vocabulary(prompt, self.info.vocab_size, "prompt")
        return prompt

    def _envelope(self, kind: Literal["chat", "completion"]) -> Envelope:
        return Envelope(kind, self.model_name)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "max_model_len": self.info.max_len,
            "default_sampling_params": self._defaults,
        }


def _retry_later() -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER_SECONDS)}


async def _unless_disconnected(http: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Await `work`, but give it up when the client hangs up."""

    async def hang_up() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise hung_up()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
