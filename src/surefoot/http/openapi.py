"""The OpenAPI document: which answers an endpoint gives, and which endpoints ask for a key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from surefoot.config.engine_plan import ServerPlan
from surefoot.http.answer_schema import ChatChunk, ErrorBody

Responses = dict[int | str, dict[str, Any]]
RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
# One entry for all of them: FastAPI then adds no 422, which this server does not send.
REFUSED = {
    "model": ErrorBody,
    "description": "Refused: 400 (`error.param` names what is wrong), 401 (the key), 404 (model or path), 405, "
    "413 (the body is too large)",
}


def json_responses(model: type[BaseModel]) -> Responses:
    """Of an endpoint that computes nothing."""
    return {200: {"model": model}, "4XX": REFUSED}


def generation_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> Responses:
    """Of an endpoint that generates: whole answers, or with `stream` server-sent events of one chunk each."""
    events = f"`data: ` and a {chunk.__name__} on one line, an empty line, and so on; `data: [DONE]` at the end"
    description = f"A {whole.__name__}; with `stream`, events that carry a {chunk.__name__} each"
    return {
        200: {
            "model": whole,
            "content": {"text/event-stream": {"schema": {"description": events}}},
            "description": description,
        },
        "4XX": REFUSED,
        500: {"model": ErrorBody, "description": "The engine failed under this request"},
        503: {
            "model": ErrorBody,
            "description": "The queue is full, or the engine is not ready",
            "headers": RETRY_AFTER,
        },
    }


def state_responses(model: type[BaseModel]) -> Responses:
    return {200: {"model": model}, 503: {"model": model, "description": "It is not so now", "headers": RETRY_AFTER}}


def document(app: FastAPI, plan: ServerPlan, open_paths: Collection[str]) -> Callable[[], dict[str, Any]]:
    """What `GET /openapi.json` gives. With a key, all but `open_paths` ask for it."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add(app.openapi_schema, ChatChunk)
            _name_model(app.openapi_schema, plan.engine.served_model_name)
            if plan.api_key:
                _ask_for_key(app.openapi_schema, open_paths)
        return app.openapi_schema

    return make


def _add(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Describes what stands in events, which responses cannot refer to."""
    described = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["components"]["schemas"] |= described.pop("$defs", {}) | {model.__name__: described}


def _name_model(schema: dict[str, Any], name: str) -> None:
    """In every body, of a request or an answer, `model` is the one that is served."""
    for described in schema["components"]["schemas"].values():
        if model := described.get("properties", {}).get("model"):
            model["enum"] = [name] if "model" in described.get("required", ()) else [name, None]


def _ask_for_key(schema: dict[str, Any], open_paths: Collection[str]) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "the key of `--api-key`"}
    schema["components"]["securitySchemes"] = {"key": scheme}
    for path, operations in schema["paths"].items():
        if path not in open_paths:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
