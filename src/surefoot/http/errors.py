"""Errors a client can see, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

ApiError(status, message, param, code)          made from whatever was raised, in one place: `to_api_error`
 ├─ 400  InvalidJson               no JSON, or not as the RFC has it
 │       RequestValidationError    a missing, unknown, wrong or unsupported parameter
 │       ParameterError            a value out of range; ContextTooLong names both lengths
 │       ChatTemplateError         messages that the model's template does not take
 │       RequestRefused            the engine refused what the frontend let pass
 ├─ 401, 404, 405, 413             key, model or path, method, size of the body
 ├─ 503  Overloaded                the queue is full          } with Retry-After
 │       EngineUnavailable         loading, dead or draining  }
 └─ 500  RequestFailed             the engine died or the request failed in it; anything unforeseen
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from surefoot.frontend.chat_template import ChatTemplateError
from surefoot.frontend.engine_client import EngineUnavailable, Overloaded, RequestFailed, RequestRefused
from surefoot.frontend.sampling_params import MAX_QUOTED_CHARACTERS, ContextTooLong, ParameterError
from surefoot.http.json_body import InvalidJson

MAX_MESSAGE_CHARACTERS = 2_000
OVERLOADED_RETRY_SECONDS = 1
INTERNAL_MESSAGE = "internal error; the server's log has the details under this response's X-Request-Id"
TYPES = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable"}


class ApiError(Exception):
    """`param` and `code` are null in the body if they are empty. What cannot be encoded becomes "?" there.

    A longer message is cut: it tells what a client has sent, and is a line of the log.
    """

    def __init__(self, status: int, message: str, param: str = "", code: str = "", retry_after: int = 0) -> None:
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}…"
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds; 0: trying again does not help

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message, param = (text.encode(errors="replace").decode() for text in (self.message, self.param))
        return {"error": {"message": message, "type": kind, "param": param or None, "code": self.code or None}}

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, headers, media_type="application/json")


def to_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _validation_error(error.errors())
        case ContextTooLong():
            return ApiError(400, str(error), error.param, "context_length_exceeded")
        case ParameterError():
            return ApiError(400, str(error), error.param, "invalid_value")
        case ChatTemplateError():
            return ApiError(400, str(error), error.param, "invalid_value")
        case RequestRefused():
            return ApiError(400, str(error))
        case Overloaded():
            return ApiError(503, str(error), code="queue_full", retry_after=OVERLOADED_RETRY_SECONDS)
        case EngineUnavailable():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=error.retry_seconds)
        case RequestFailed():
            return ApiError(500, str(error), code="request_failed")
        case InvalidJson():
            return ApiError(400, error.detail, code="invalid_json")
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            return ApiError(500, INTERNAL_MESSAGE, code="internal_error")


def _validation_error(errors: Sequence[dict[str, Any]]) -> ApiError:
    """Speaks of the first wrong parameter. A union of types gives one error for each type: all are told."""
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "extra_forbidden":
        within = _place(first["loc"])
        param = f"{within}." * bool(within) + first["ctx"]["name"][:MAX_QUOTED_CHARACTERS]
        return ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    if len(first["loc"]) < 2:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    name = str(first["loc"][1])
    messages = dict.fromkeys(error["msg"] for error in errors if error["loc"][1] == name)
    code = first["type"] if first["type"] == "unsupported_value" else "invalid_value"
    code = "missing_required_parameter" if first["type"] == "missing" else code
    deepest = max((error["loc"] for error in errors if error["loc"][1] == name), key=len)
    place = _place(deepest) if len(messages) == 1 else name
    return ApiError(400, f"{place}: {'; or: '.join(messages)}", name, code)


def _place(loc: Sequence[str | int]) -> str:
    """`messages.0.content` for ("body", "messages", 0, "content", "list[TextPart]"): without the types of a union."""
    return ".".join(str(part) for part in loc[1:] if not (isinstance(part, str) and "[" in part))
