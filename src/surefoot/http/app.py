"""The application: every endpoint, and what stands around them all.

chat_completions, completions    POST /v1/chat/completions, /v1/completions
tokenization                     POST /tokenize, /detokenize, also under /v1
operations                       GET /v1/models, /health, /ready, /metrics, /version, /plan
"""

from __future__ import annotations

from importlib.metadata import version as version_of

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefoot.config.engine_plan import ServerPlan
from surefoot.frontend.chat_template import ChatTemplateError
from surefoot.frontend.engine_client import EngineClient, EngineClientError
from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.chat_completions import chat_router
from surefoot.http.completions import completion_router
from surefoot.http.edge import OPEN_PATHS, Edge
from surefoot.http.errors import ApiError, to_api_error
from surefoot.http.metrics import Metrics
from surefoot.http.openapi import document
from surefoot.http.operations import model_router, operations_router
from surefoot.http.service import Service, Tokenizer
from surefoot.http.tokenization import tokenization_router

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
    metrics = Metrics(server_plan.engine)
    client.subscribe(metrics.observe)
    service = Service(server_plan, tokenizer, client, metrics)
    app = FastAPI(
        title="surefoot", version=version_of("surefoot"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    for router in (chat_router, completion_router, tokenization_router, model_router, operations_router):
        app.include_router(router(service))
    app.openapi = document(app, server_plan, OPEN_PATHS)  # type: ignore[method-assign]
    for error in ERRORS_WITH_A_BODY:
        app.add_exception_handler(error, _answer_error)
    app.add_middleware(Edge, plan=server_plan, metrics=metrics)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    headers = error.headers or {} if isinstance(error, HTTPException) else {}  # such as the methods that are allowed
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = ApiError(error.status_code, f"there is no {request.method} {request.url.path}")
    api_error = to_api_error(error)
    request.state.refusal = str(api_error)  # for the log
    response = api_error.response()
    response.headers.update(headers)
    return response
