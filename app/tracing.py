"""The HTTP side of a request's trace: its root span, and the work a replica does for it.

The root span lasts from arrival to the last byte and continues the caller's trace. The engine's
spans become its children: the context travels with the request. Names and attributes follow
OpenTelemetry's GenAI conventions where there is one (they are not in its packages' public part yet):
https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api_error import ApiError
from app.schemas import ChatRequest, CompletionRequest
from engine_actor.request import Output
from engine_actor.span_export import SCOPE, SpanSink

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""Routes that are traced, and what they are called in GenAI terms."""
PROVIDER = "slotserve"
DISCONNECTED = "client_disconnected"
_STATE = "slotserve.trace"

_to_engine = TraceContextTextMapPropagator()
"""Ours, whatever OTEL_PROPAGATORS says of callers' headers."""


def open_tracer(sink: SpanSink | None) -> Tracer:
    """A tracer into the sink; one that does nothing where there is none."""
    if sink is None:
        return NoOpTracer()
    # Sampling follows the caller; OTEL_TRACES_SAMPLER decides about requests that bring no context.
    provider = TracerProvider(resource=sink.resource, shutdown_on_exit=False)
    provider.add_span_processor(sink)
    return provider.get_tracer(SCOPE.name)


class RequestTrace:
    """The spans of one HTTP request, from its arrival on."""

    def __init__(self, tracer: Tracer, route: str, headers: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._operation = OPERATIONS[route]
        self._root = tracer.start_span(
            self._operation,
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                HTTP_REQUEST_METHOD: "POST",
                HTTP_ROUTE: route,
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": PROVIDER,
            },
        )
        self._context = set_span_in_context(self._root)
        self._arrived = time.monotonic()
        self._detokenize: Span | None = None
        self._detokenize_seconds = 0.0
        self._output_tokens = 0
        self._reasons: dict[int, str] = {}
        self._preemptions: dict[int, int] = {}
        self._failure: str | None = None

    @property
    def carrier(self) -> dict[str, str]:
        """W3C headers under which the engine's spans belong."""
        headers: dict[str, str] = {}
        _to_engine.inject(headers, context=self._context)
        return headers

    @contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """A child span around a piece of work. A client's mistake found in it is no failure of it."""
        with self._tracer.start_as_current_span(
            name, context=self._context, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except Exception as error:
                if not isinstance(error, ApiError) or error.status >= 500:
                    span.record_exception(error)
                    span.set_status(StatusCode.ERROR)
                raise

    def describe(
        self,
        model: str,
        body: ChatRequest | CompletionRequest,
        *,
        response_id: str,
        tenant: str,
        prompt_tokens: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """Say what is asked for, once it is understood. The prompt's text is not among it."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.request.stream": body.stream,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.request.seed": seed,
            "gen_ai.request.choice.count": body.n,
            "gen_ai.request.temperature": body.temperature,
            "gen_ai.request.top_p": body.top_p,
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "slotserve.tenant": tenant,
            "slotserve.priority": body.priority,
        }
        if body.top_k > 0:
            attributes["gen_ai.request.top_k"] = body.top_k
        self._root.update_name(f"{self._operation} {model}")
        self._root.set_attributes(attributes)

    def reveal(self, prompts: Sequence[str]) -> None:
        """Put the prompts' text into the trace: only for those who asked for it in the settings."""
        messages = [{"role": "user", "parts": [{"type": "text", "content": prompt}]} for prompt in prompts]
        self._root.set_attribute("gen_ai.input.messages", json.dumps(messages))

    def detokenized(self, sequence: int, output: Output, finish_reason: str | None, seconds: float) -> None:
        """An output has become text: the first opens the span `detokenize`, the last closes it."""
        if self._detokenize is None:
            waited = time.monotonic() - self._arrived
            self._root.set_attribute("gen_ai.response.time_to_first_chunk", waited)
            self._detokenize = self._tracer.start_span("detokenize", context=self._context)
        self._detokenize_seconds += seconds
        self._output_tokens += output.sampled is not None
        self._preemptions[sequence] = output.num_preemptions
        if finish_reason is not None:
            self._reasons[sequence] = finish_reason

    def fail(self, error_type: str) -> None:
        """The request has failed here, whatever its status says: a stream's is out before its end."""
        self._failure = error_type

    def end(self, status: int | None, *, complete: bool) -> None:
        """The last byte is out, or nobody is there to take it."""
        if self._detokenize is not None:
            self._detokenize.set_attribute("slotserve.detokenize.tokens", self._output_tokens)
            self._detokenize.set_attribute("slotserve.detokenize.busy_us", self._detokenize_seconds * 1e6)
            self._detokenize.end()
            reasons = [reason for _, reason in sorted(self._reasons.items())]
            self._root.set_attribute("gen_ai.response.finish_reasons", reasons)
            self._root.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
            self._root.set_attribute("slotserve.num_preemptions", sum(self._preemptions.values()))
        if status is not None:
            self._root.set_attribute(HTTP_RESPONSE_STATUS_CODE, status)
        if self._failure is not None:
            self._root.set_attribute(ERROR_TYPE, self._failure)
            self._root.set_status(StatusCode.ERROR)
        elif not complete or status is None or status == 499:
            self._root.set_attribute(ERROR_TYPE, DISCONNECTED)
        elif status >= 500:
            self._root.set_attribute(ERROR_TYPE, str(status))
            self._root.set_status(StatusCode.ERROR)
        self._root.end()


class TracingMiddleware:
    """Opens a RequestTrace when a request that generates arrives, and ends it after the last byte."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        # As the router sees it: without the prefix under which the application is mounted.
        route = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if route not in OPERATIONS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(self._tracer, route, HTTPConnection(scope).headers)
        scope[_STATE] = trace
        status: int | None = None
        complete = False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            raise
        except Exception as error:
            # Answered outside of this middleware, by Starlette's outermost one.
            status = 500 if status is None else status
            trace.fail(type(error).__name__)
            raise
        finally:
            trace.end(status, complete=complete)


def trace_of(connection: HTTPConnection) -> RequestTrace:
    """The trace the middleware has opened for this request."""
    trace: RequestTrace = connection.scope[_STATE]
    return trace
