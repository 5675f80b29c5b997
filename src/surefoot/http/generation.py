"""From accepted sequences to one HTTP answer, whole or as server-sent events.

`GenerationResponse` submits first and sends headers only when the engine has accepted, so a full queue is a 503. It
runs beside a watcher of the connection: a client that leaves cancels the answer, which aborts the sequences. A stream
ends with `data: [DONE]`, or with one `data: {"error": ...}` and no [DONE] if it failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from surefoot.frontend.engine_client import Begun, Delta, Ended, RequestFailed, Update
from surefoot.frontend.output import Output, Score, ScoredToken
from surefoot.http.errors import to_api_error
from surefoot.http.metrics import Outcome
from surefoot.http.openai_schema import NO_STREAM_OPTIONS, GenerationBody, StreamOptions
from surefoot.http.service import Service
from surefoot.http.tally import Tally
from surefoot.http.turns import in_turn

Json = dict[str, Any]
JSON_HEADERS = [(b"content-type", b"application/json")]
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

log = logging.getLogger("surefoot.http")


@dataclass
class Choice:
    """One sequence of a whole answer."""

    index: int
    prompt_scores: Sequence[Score] = ()
    texts: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class AnswerShape(Protocol):
    """How an endpoint spells its answer. Stream and whole are spelled from the same updates."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The fields that the envelope does not have."""

    def opening(self) -> list[Json]:
        """Choices of the first chunk, before anything is computed; empty if there is no such chunk."""

    def begun(self, index: int, prompt_scores: Sequence[Score]) -> list[Json]:
        """Choices of the chunk after a prompt; empty if there is no such chunk."""

    def piece(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> Json: ...

    def ending(self, index: int, reason: str, tokens: Sequence[ScoredToken]) -> Json: ...


class GenerationResponse(Response):
    def __init__(
        self, service: Service, request: Request, body: GenerationBody, outputs: Sequence[Output], shape: AnswerShape
    ) -> None:
        super().__init__()
        self._service = service
        self._body = body
        self._outputs = outputs
        self._shape = shape
        self._request_id: str = request.state.request_id
        self._path = request.url.path
        self._tally = Tally(service.metrics, request.state.began, outputs)
        self._envelope = {"id": shape.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": body.model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            left = not await unless_client_leaves(receive, self._answer(send))
        except asyncio.CancelledError:
            self._record(Outcome.CLIENT_LEFT)
            raise
        if left:
            self._record(Outcome.CLIENT_LEFT)

    async def _answer(self, send: Send) -> None:
        """Errors before the answer has begun are raised: the application turns them into an error response."""
        async with self._service.client.generate(self._outputs) as updates:
            self._tally.count_accepted(self._body.n)
            if self._body.stream:
                await self._send_events(updates, send)
            else:
                await self._send_whole(updates, send)

    async def _send_whole(self, updates: AsyncIterator[Update], send: Send) -> None:
        choices = [Choice(index) for index in range(len(self._outputs))]
        try:
            async for update in updates:
                self._tally.count(update)
                choice = choices[update.index]
                match update:
                    case Begun(_, prompt_scores):
                        choice.prompt_scores = prompt_scores
                    case Delta(_, text, tokens):
                        choice.texts.append(text)
                        choice.tokens += tokens
                    case Ended():
                        choice.reason = update.reason
                        choice.tokens += update.tokens
        except RequestFailed:
            self._tally.end_open("error")
            raise
        scored = sum(len(choice.prompt_scores) + len(choice.tokens) for choice in choices)
        content = await in_turn(scored, lambda: self._whole(choices))
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": content})
        self._record(Outcome.COMPLETED)

    async def _send_events(self, updates: AsyncIterator[Update], send: Send) -> None:
        outcome, shape = Outcome.COMPLETED, self._shape
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        try:
            if opening := shape.opening():
                await send(self._event(opening))
            async for update in updates:
                self._tally.count(update)
                match update:
                    case Begun(index, prompt_scores):
                        if begun := shape.begun(index, prompt_scores):
                            await send(self._event(begun))
                    case Delta(index, text, tokens):
                        await send(self._event([shape.piece(index, text, tokens)]))
                    case Ended():
                        await send(self._event([shape.ending(update.index, update.reason, update.tokens)]))
            if self._options.include_usage:
                await send(self._event([], self._tally.whole_usage()))
            last = b"data: [DONE]\n\n"
        except Exception as error:
            outcome = Outcome.FAILED
            self._tally.end_open("error")
            api_error = to_api_error(error)
            unforeseen = api_error.code == "internal_error"
            log.error("%s failed: %s", self._request_id, error, exc_info=unforeseen, extra=self._log_fields)
            last = b"data: " + one_line(msgspec.json.encode(api_error.body)) + b"\n\n"
        await send({"type": "http.response.body", "body": last})
        self._record(outcome)

    def _whole(self, choices: Sequence[Choice]) -> bytes:
        answer = {"object": self._shape.whole_object, "usage": self._tally.whole_usage()}
        return msgspec.json.encode(self._envelope | self._shape.whole(choices) | answer)

    def _event(self, choices: list[Json], usage: Json | None = None) -> Json:
        """With include_usage every chunk has a usage, which is null in all but the last."""
        chunk = self._envelope | {"object": self._shape.chunk_object, "choices": choices}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage or self._tally.usage()
        elif self._options.include_usage:
            chunk["usage"] = usage
        data = b"data: " + one_line(msgspec.json.encode(chunk)) + b"\n\n"
        return {"type": "http.response.body", "body": data, "more_body": True}

    @property
    def _options(self) -> StreamOptions:
        return self._body.stream_options or NO_STREAM_OPTIONS

    @property
    def _log_fields(self) -> dict[str, str]:
        return {"request_id": self._request_id}

    def _record(self, outcome: Outcome) -> None:
        tally = self._tally
        tally.end_open("abort")
        self._service.metrics.count_request(outcome)
        log.info(
            "%s %s %s: %d prompt tokens (%d cached), %d output tokens, %.3f s, %s",
            self._request_id,
            self._path,
            outcome,
            tally.prompt_tokens,
            tally.cached_tokens,
            tally.output_tokens,
            time.monotonic() - tally.began,
            ",".join(tally.reasons) or "no finish reason",
            extra=self._log_fields,
        )


def one_line(json: bytes) -> bytes:
    """Escapes what ends no line of an event stream, but a line for Python's `splitlines`, which clients use."""
    return (
        json.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` to its end, or cancels it when the client disconnects. Whether it came to its end."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
