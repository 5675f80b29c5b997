"""What is asked of a server besides answers: which model it has, how it is, what it decided.

GET /v1/models, /v1/models/{name}
GET /health    200 while the process tree lives or comes back; 503 when only a restart of the server helps
GET /ready     200 while requests are served; 503 while the engine loads, has died, or the server drains
GET /metrics   Prometheus; /metrics/vllm and /metrics/sglang have the same figures under other engines' names
GET /plan      the resolved EnginePlan        GET /version        GET /   where to read on
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version as version_of
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from surefoot.frontend.engine_client import EngineState
from surefoot.http.answer_schema import Model, ModelList, State, Version
from surefoot.http.metrics import Names
from surefoot.http.openapi import REFUSED, json_responses, state_responses
from surefoot.http.service import Service

WELCOME = {"server": "surefoot", "version": version_of("surefoot"), "api": "/openapi.json", "models": "/v1/models"}


def model_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])
    engine = service.plan.engine
    model = {
        "id": engine.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "surefoot",
        "max_model_len": engine.bounds.max_model_len,
    }

    @router.get("/v1/models", responses=json_responses(ModelList))
    async def models() -> Response:
        """A list of one model."""
        return _json({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}", responses=json_responses(Model))
    async def one_model(name: str) -> Response:
        """That model, if it is served here."""
        service.check_model(name)
        return _json(model)

    return router


def operations_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])
    client = service.client

    def state(good: Callable[[EngineState], bool]) -> Response:
        if good(client.state):
            return _json({"status": client.state})
        headers = {"Retry-After": str(client.retry_seconds)} if client.retry_seconds else {}
        return _json({"status": client.state, "detail": client.state_detail}, 503, headers)

    @router.get("/health", responses=state_responses(State))
    async def health() -> Response:
        """Whether the server can serve or will be able to."""
        return state(lambda now: now is not EngineState.DEAD)

    @router.get("/ready", responses=state_responses(State))
    async def ready() -> Response:
        """Whether requests are served now."""
        return state(lambda now: now is EngineState.READY)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return _metrics(Names.OWN)

    @router.get("/metrics/vllm", response_class=PlainTextResponse)
    async def metrics_as_vllm() -> Response:
        """The same figures under vLLM's names, as far as it has such."""
        return _metrics(Names.VLLM)

    @router.get("/metrics/sglang", response_class=PlainTextResponse)
    async def metrics_as_sglang() -> Response:
        """The same figures under SGLang's names, as far as it has such."""
        return _metrics(Names.SGLANG)

    def _metrics(names: Names) -> Response:
        return Response(service.metrics.render(names), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version", responses={200: {"model": Version}})
    async def version() -> Response:
        return _json({"version": version_of("surefoot")})

    @router.get("/plan", responses={200: {"model": dict[str, Any]}, "4XX": REFUSED})
    async def plan() -> Response:
        """Everything that was decided at the start, with the reasons."""
        return _json(service.plan.engine)

    @router.get("/", responses={200: {"model": dict[str, str]}})
    async def welcome() -> Response:
        """Where to read on."""
        return _json(WELCOME)

    return router


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
