"""The application: endpoints for completions, and for whoever operates the server.

POST /v1/chat/completions, /v1/completions      GET /v1/models, /v1/models/{name}
GET /health    200 while the process tree lives or comes back; 503 when only a restart of the server helps
GET /ready     200 while requests are served; 503 while the engine loads, has died, or the server drains
GET /metrics   Prometheus        GET /version        GET /plan   the resolved EnginePlan
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version as version_of
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefoot.config.engine_plan import ServerPlan
from surefoot.frontend.chat_template import ChatTemplateError
from surefoot.frontend.engine_client import EngineClient, EngineClientError, EngineState
from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.chat_completions import chat_router
from surefoot.http.completions import completion_router
from surefoot.http.edge import Edge
from surefoot.http.errors import UNAVAILABLE_RETRY_SECONDS, ApiError, to_api_error
from surefoot.http.metrics import Metrics
from surefoot.http.service import Service, Tokenizer

ERRORS_WITH_A_BODY = (
    ApiError,
    RequestValidationError,
    HTTPException,
    ParameterError,
    ChatTemplateError,
    EngineClientError,
)


def create_app(server_plan: ServerPlan, tokenizer: Tokenizer, client: EngineClient) -> FastAPI:
    """The caller runs `client.run()` beside it."""
    metrics = Metrics()
    client.subscribe(metrics.observe)
    service = Service(server_plan, tokenizer, client, metrics)
    app = FastAPI(title="surefoot", version=version_of("surefoot"), docs_url=None, redoc_url=None)
    app.include_router(chat_router(service))
    app.include_router(completion_router(service))
    app.include_router(_models_router(service))
    app.include_router(_operations_router(service))
    for error in ERRORS_WITH_A_BODY:
        app.add_exception_handler(error, _answer_error)
    app.add_middleware(Edge, api_key=server_plan.api_key, metrics=metrics)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = ApiError(error.status_code, f"there is no {request.method} {request.url.path}")
    api_error = to_api_error(error)
    request.state.refusal = str(api_error)  # for the log
    return api_error.response()


def _models_router(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.plan.engine
    model = {
        "id": engine.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "surefoot",
        "max_model_len": engine.bounds.max_model_len,
    }

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return _json(model)

    return router


def _operations_router(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.client

    def state(good: Callable[[EngineState], bool]) -> Response:
        if good(client.state):
            return _json({"status": client.state})
        headers = {"Retry-After": str(UNAVAILABLE_RETRY_SECONDS)}
        return _json({"status": client.state, "detail": client.state_detail}, 503, headers)

    @router.get("/health")
    async def health() -> Response:
        return state(lambda now: now is not EngineState.DEAD)

    @router.get("/ready")
    async def ready() -> Response:
        return state(lambda now: now is EngineState.READY)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version")
    async def version() -> Response:
        return _json({"version": version_of("surefoot")})

    @router.get("/plan")
    async def plan() -> Response:
        return _json(service.plan.engine)

    return router


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
