"""The HTTP application and the Ray Serve deployments around it.

`serve run serve_config.yaml` calls `build` with the file's args.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from app.api_error import ApiError
from app.config import Settings
from app.engine_client import EngineClient
from app.observe import Observatory
from app.parsing import IGNORED_HEADER
from app.ray_engines import SupervisorDirectory
from app.refusals import Refusals
from app.service import Service
from app.tenants import Tenants, digest
from app.tokenizer import Tokenizer
from app.tracing import TracingMiddleware, open_tracer
from engine_actor.span_export import SpanSink, open_sink
from engine_actor.supervisor import Supervisor
from model.files import find_model

log = logging.getLogger("ray.serve")

SHUTDOWN_SECONDS = 2.0
"""Replicas and engines leave together, so waiting longer would not finish an answer."""


LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(
    service: Service,
    lifespan: Callable[[FastAPI], Any] | None = None,
    sink: SpanSink | None = None,
) -> FastAPI:
    """The HTTP application around a service."""
    # No /docs page: it would load its scripts from another host.
    app = FastAPI(title="slotserve", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(TracingMiddleware, tracer=open_tracer(sink))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=service.settings.cors_origins,
        allow_origin_regex=LOCAL_PAGES,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", IGNORED_HEADER],
    )
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", service.chat_completions),
        ("POST", "/v1/completions", service.completions),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{model_id:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/tokenizer_info", service.tokenizer_info),
        ("GET", "/health", service.health),
    ]
    for method, path, endpoint in routes:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    Observatory(service.views, service.hello, service.tenants.of, service.refusals.families).install(app)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        if error.status != 499:
            service.refusals.count(error.status, error.reason)
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(http: Request, error: HTTPException) -> Response:
        if http.method == "OPTIONS" and error.status_code == 405:
            return Response(status_code=204, headers=error.headers)
        code = "unknown_url" if error.status_code == 404 else None
        message = f"{error.detail}: {http.method} {http.url.path}"
        return await on_api_error(
            http, ApiError(error.status_code, message, code=code, headers=error.headers)
        )

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        service.refusals.count(500, "internal")
        return JSONResponse(ApiError(500, f"Internal error: {type(error).__name__}").body(), 500)

    return app


class Ingress:
    """One HTTP replica."""

    def __init__(self, settings: Settings, keys: dict[str, str], supervisor: DeploymentHandle) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        directory = SupervisorDirectory(supervisor)
        client = EngineClient(replica, settings.num_engines, directory, settings.max_waiting)
        tokenizer = Tokenizer.load(find_model(settings.model), Path(settings.run_dir))
        service = Service(
            settings, tokenizer, client, Tenants(keys, settings.max_tenants), Refusals(directory)
        )

        sink = open_sink(f"replica-{replica}", settings.telemetry_config(service.model_name))

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await client.start()
            log.info("serving %s: %s", service.model_name, client.info.summary)
            if (beyond := len(tokenizer) - client.info.vocab_size) > 0:
                log.warning("%d tokens have no embedding: a prompt with one of them is refused", beyond)
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
