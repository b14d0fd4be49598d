"""HTTP in, text out: routes, limits, errors, and the Ray Serve application.

`serve run serve_config.yaml` calls `build` with the file's args.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app.config import Settings
from app.engine_client import EngineClient, Generation, NoEngineError, QueueFullError, RayEngine
from app.live import EngineView
from app.observe import Observatory
from app.openai_api import (
    DONE,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Envelope,
    Message,
    TokenizeRequest,
    Usage,
    check_vocabulary,
    choice_seed,
    invalid,
    parse,
    random_seed,
    sse,
)
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
from app.tenants import Tenants, digest
from app.text import TemplateError, Tokenizer
from app.tracing import RequestTrace, TracingMiddleware, open_tracer, trace_of
from engine_actor import request as engine_request
from engine_actor.messages import EngineInfo
from engine_actor.span_export import SpanSink, open_sink
from engine_actor.supervisor import Supervisor
from model.files import find_model

log = logging.getLogger("ray.serve")

OWNER = "slotserve"
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
RETRY_AFTER_SECONDS = 1
SHUTDOWN_SECONDS = 2.0
"""Replicas and engines leave together, so waiting longer would not finish an answer."""


class Job:
    """One HTTP request that generates: its prompts, its sequences, and what they have said so far.

    Sequence `p * n + c` is choice c of prompt p, and the response's choice of that index.
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
            Choice(tokenizer, body.stops, min_tokens=body.min_tokens, offset=len(self.echoed[i // body.n]))
            for i in range(len(prompts) * body.n)
        ]

    def prompt_of(self, sequence: int) -> int:
        """Which prompt a sequence answers."""
        return sequence // self.body.n

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False

    async def pieces(self, generation: Generation) -> AsyncIterator[tuple[int, Piece, engine_request.Output]]:
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
            if piece.finish_reason is not None and output.finish_reason is None:
                generation.end(sequence)
            yield sequence, piece, output

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole response."""
        answers = [Answer() for _ in self.choices]
        async for sequence, piece, output in self.pieces(generation):
            answers[sequence].prompt_scores += output.prompt_scores
            answers[sequence].add(piece)
        choices = [self._whole(sequence, answer) for sequence, answer in enumerate(answers)]
        return self.envelope.body(choices, chunk=False) | {"usage": self.usage.body()}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The response as server-sent events, `data: [DONE]` last; an error ends it early."""
        options = self.body.stream_options
        include_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats

        def event(choices: list[dict[str, Any]], *, last: bool = False) -> bytes:
            body = self.envelope.body(choices, chunk=True)
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
            yield sse(error.body())

    def _whole(self, sequence: int, answer: Answer) -> dict[str, Any]:
        prompt = self.prompt_of(sequence)
        if isinstance(self.body, ChatRequest):
            logprobs = chat_logprobs(self.tokenizer, answer.tokens) if self.wants_logprobs else None
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.text,
                "refusal": None,
                "annotations": [],
            }
            choice = {"index": sequence, "message": message, "logprobs": logprobs}
        else:
            tokens = self._with_echo(sequence, answer.tokens, answer.prompt_scores)
            logprobs = completion_logprobs(self.tokenizer, tokens) if self.wants_logprobs else None
            choice = {"text": self.echoed[prompt] + answer.text, "index": sequence, "logprobs": logprobs}
        choice["finish_reason"] = answer.finish_reason
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, answer.prompt_scores)
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

    def _chunks(self, sequence: int, piece: Piece, output: engine_request.Output) -> list[dict[str, Any]]:
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
        return echoed_tokens(self.tokenizer, self.prompts[self.prompt_of(sequence)], scores) + tokens


class EventStream(StreamingResponse):
    """Server-sent events that drop their generation however the connection ends."""

    def __init__(self, job: Job, generation: Generation) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": job.envelope.id}
        super().__init__(job.events(generation), media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response. The generator's own `finally` would not run if it had never been started."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


class Service:
    """Answers requests. Knows HTTP's rules and the engine's limits, not Ray."""

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer, client: EngineClient, tenants: Tenants
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.client = client
        self.tenants = tenants
        self.model_name = settings.model_name or find_model(settings.model).name
        self._started = int(time.time())

    @property
    def info(self) -> EngineInfo:
        """What the engines turned out to be."""
        return self.client.info

    async def chat_completions(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        arrival, tenant = time.time(), self.tenants.of(http.headers)
        body = parse(ChatRequest, await self._read(http))
        self._check(body)
        trace = trace_of(http)
        with trace.span("tokenize"):
            prompt = await self._encode_chat(body.messages)
        asked = body.max_completion_tokens or body.max_tokens
        param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        max_tokens = self._fit("messages", len(prompt), asked, self.info.max_len, param)
        job = Job(body, self._envelope("chat"), self.tokenizer, [prompt], trace)
        wanted = (body.wanted_logprobs, body.prompt_logprobs)
        return await self._run(http, job, [max_tokens], wanted, arrival, tenant)

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        arrival, tenant = time.time(), self.tenants.of(http.headers)
        body = parse(CompletionRequest, await self._read(http))
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
        asked = None if body.max_tokens is None else max(1, body.max_tokens)
        max_tokens = [self._fit("prompt", len(prompt), asked, COMPLETION_MAX_TOKENS) for prompt in prompts]
        scores = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scores = max(body.logprobs, scores or 0)
        job = Job(body, self._envelope("completion"), self.tokenizer, prompts, trace)
        return await self._run(http, job, max_tokens, (body.logprobs, scores), arrival, tenant)

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
        body = parse(TokenizeRequest, await self._read(http))
        self._check_model(body.model)
        if body.messages is not None:
            tokens = await self._encode_chat(body.messages, body.add_generation_prompt)
        else:
            tokens = await asyncio.to_thread(
                self.tokenizer.encode, body.prompt or "", add_special_tokens=body.add_special_tokens
            )
        answer = {"count": len(tokens), "max_model_len": self.info.max_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [self.tokenizer.token_text(token) for token in tokens]
        return JSONResponse(answer)

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize, with vLLM's fields."""
        self.tenants.of(http.headers)
        body = parse(DetokenizeRequest, await self._read(http))
        self._check_model(body.model)
        check_vocabulary(body.tokens, self.info.vocab_size, "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens)})

    def views(self) -> dict[str, EngineView]:
        """The engines as the live page, the trace and the metrics see them."""
        found = self.client.engines()
        return {name: engine for name, (engine, _) in found.items() if isinstance(engine, RayEngine)}

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
                "steps": status.steps,
                "running": status.running,
                "waiting": status.waiting,
                "free_kv_tokens": status.free_kv,
            }
            for name, status in engines.items()
        }
        body = {"status": "ok" if healthy else "unhealthy", "engine": self.info.summary, "engines": described}
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
        body = job.body
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
                    seed=choice_seed(seed, sequence % body.n),
                    logprobs=wanted[0],
                    prompt_logprobs=wanted[1],
                ),
                eos_token_ids=self.tokenizer.eos_token_ids,
                tenant=tenant,
                priority=body.priority,
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
        if body.stream:
            return EventStream(job, generation)
        try:
            answer = await _unless_disconnected(http, job.answer(generation))
        finally:
            generation.close()
        return JSONResponse(answer, headers={"X-Request-Id": job.envelope.id})

    async def _read(self, http: Request) -> bytes:
        """The body. Raises ApiError 413 as soon as it is known to be too large."""
        limit = self.settings.max_body_bytes
        declared = http.headers.get("content-length", "")
        parts: list[bytes] = []
        size = int(declared) if declared.isdigit() else 0
        if size <= limit:
            size = 0
            async for part in http.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
        if size > limit:
            raise ApiError(413, f"The body exceeds the limit of {limit} bytes.", code="body_too_large")
        return b"".join(parts)

    def _check(self, body: ChatRequest | CompletionRequest) -> None:
        self._check_model(body.model)
        if body.n > self.settings.max_n:
            raise invalid(f"Invalid 'n': {body.n}, the limit is {self.settings.max_n}", "n")

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

    async def _encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        turns = [message.as_template_input() for message in messages]
        try:
            return await asyncio.to_thread(
                self.tokenizer.encode_chat, turns, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise invalid(f"Invalid 'messages': {error}", "messages") from None

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self.tokenizer.encode, prompt)
            if not prompt:
                raise invalid("Invalid 'prompt': it has no tokens", "prompt")
        else:
            check_vocabulary(prompt, self.info.vocab_size, "prompt")
        return prompt

    def _envelope(self, kind: Literal["chat", "completion"]) -> Envelope:
        return Envelope(kind, self.model_name, self.info.fingerprint)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": OWNER,
            "max_model_len": self.info.max_len,
        }


def _delta(index: int, delta: dict[str, Any], logprobs: object, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


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
            raise ApiError(499, "The client closed the connection.")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def create_app(
    service: Service,
    lifespan: Callable[[FastAPI], Any] | None = None,
    sink: SpanSink | None = None,
) -> FastAPI:
    """The HTTP application around a service."""
    # No /docs page: it would load its scripts from another host.
    app = FastAPI(title="slotserve", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(TracingMiddleware, tracer=open_tracer(sink))
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", service.chat_completions),
        ("POST", "/v1/completions", service.completions),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{model_id:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/health", service.health),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    Observatory(service.views, service.hello, service.tenants.of).install(app)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(http: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {http.method} {http.url.path}"
        code = "unknown_url" if error.status_code == 404 else None
        return JSONResponse(ApiError(error.status_code, message, code=code).body(), error.status_code)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"Internal error: {type(error).__name__}").body(), 500)

    return app


class SupervisorDirectory:
    """Finds engines through the supervisor's deployment handle."""

    def __init__(self, supervisor: DeploymentHandle) -> None:
        self._supervisor = supervisor

    async def engine(self, index: int) -> tuple[str, RayEngine, EngineInfo]:
        """See Directory."""
        found = await self._supervisor.engine.remote(index)
        return found.name, RayEngine(found.actor), found.info


class Ingress:
    """One HTTP replica."""

    def __init__(self, settings: Settings, keys: dict[str, str], supervisor: DeploymentHandle) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        client = EngineClient(replica, settings.num_engines, SupervisorDirectory(supervisor))
        tokenizer = Tokenizer.load(find_model(settings.model), Path(settings.run_dir))
        service = Service(settings, tokenizer, client, Tenants(keys, settings.max_tenants))

        sink = open_sink(f"replica-{replica}", settings.telemetry_config(service.model_name))

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await client.start()
            log.info("serving %s: %s", service.model_name, client.info.summary)
            yield
            await client.stop()
            if sink is not None:
                await asyncio.to_thread(sink.shutdown)

        self._app = create_app(service, lifespan, sink)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def build(settings: Settings) -> serve.Application:
    """The Serve application. Raises if a setting, the model or the keys are not usable."""
    model_name = settings.model_name or find_model(settings.model).name
    keys = settings.api_keys()
    # The engine's own queue is the only one: Serve must not hold requests back.
    unlimited = 1_000_000
    supervisor = serve.deployment(
        Supervisor,
        name="Supervisor",
        max_ongoing_requests=unlimited,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    ).bind(settings.num_engines, settings.engine_config(), settings.telemetry_config(model_name))
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.num_replicas,
        max_ongoing_requests=unlimited,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(settings, {digest(key): who.tenant for key, who in keys.items()}, supervisor)
