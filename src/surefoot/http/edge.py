"""What every request passes on its way in and out: its id, the key, the size limit, the last catch.

Plain ASGI, since the framework's middleware classes put a task and a queue between an endpoint and its client.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.config.engine_plan import ServerPlan
from surefoot.http.errors import ApiError, to_api_error
from surefoot.http.metrics import Metrics, Outcome

MAX_REQUEST_ID_CHARACTERS = 128
MAX_LENGTH_DIGITS = 20
GENERATION_PATHS = {"/v1/chat/completions", "/v1/completions"}
# What load balancers and Prometheus ask for, who have no key. Everything else asks for it, if there is one.
OPEN_PATHS = {"/", "/health", "/ready", "/version", "/metrics", "/metrics/vllm", "/metrics/sglang"}

log = logging.getLogger("surefoot.http")


class Edge:
    def __init__(self, app: ASGIApp, plan: ServerPlan, metrics: Metrics) -> None:
        self._app = app
        self._api_key = plan.api_key.encode()
        self._max_body_bytes = plan.max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {}).update(request_id=request_id, began=time.monotonic(), refusal="")
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except Exception as error:
            if not isinstance(error, ApiError):
                line = _one_line(f"{request_id} {scope['method']} {scope['path']}: unforeseen error")
                log.exception("%s", line, extra={"request_id": request_id})
            if status:
                raise  # the answer has begun: the server closes the connection
            api_error = to_api_error(error)
            scope["state"]["refusal"] = str(api_error)
            await api_error.response()(scope, receive, send_with_id)
        if status >= 400 and scope["path"] in GENERATION_PATHS:
            line = _one_line(f"{request_id} {status} {scope['path']}: {scope['state']['refusal']}")
            log.info("%s", line, extra={"request_id": request_id})
            self._metrics.count_request(Outcome.REFUSED if status < 500 or status == 503 else Outcome.FAILED)

    def _check(self, path: str, headers: Headers) -> None:
        if self._api_key and path not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._api_key):
                raise ApiError(401, "wrong or missing key: send `Authorization: Bearer <key>`", code="invalid_api_key")
        length = headers.get("content-length", "0")[:MAX_LENGTH_DIGITS]
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise ApiError(413, self._too_large)

    def _limited(self, receive: Receive) -> Receive:
        """Counts the body, which may come in chunks without a Content-Length."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes, the limit set by --max-body-mib"


def _request_id(headers: Headers) -> str:
    """The client's own, if it is fit for a header and a log line."""
    given = headers.get("x-request-id", "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS
    return given if usable else uuid.uuid4().hex


def _one_line(text: str) -> str:
    """What clients send may not look like lines of the log."""
    return text if text.isprintable() else ascii(text)
