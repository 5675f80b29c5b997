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

from surefoot.frontend.detokenizer import TextStream
from surefoot.frontend.engine_client import Delta, Ended, Update
from surefoot.http.errors import to_api_error
from surefoot.http.metrics import Outcome
from surefoot.http.openai_schema import GenerationBody
from surefoot.http.service import Service
from surefoot.protocol.messages import GenerateRequest

Json = dict[str, Any]
JSON_HEADERS = [(b"content-type", b"application/json")]
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

log = logging.getLogger("surefoot.http")


class AnswerShape(Protocol):
    """How an endpoint spells its answer. Each method gives the choices of a whole answer or of one chunk."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, text: str, reason: str) -> Json: ...

    def opening(self, count: int) -> list[Json]:
        """Choices of the first chunk, before any text; empty if there is no such chunk."""

    def piece(self, index: int, text: str) -> Json: ...

    def ending(self, index: int, reason: str) -> Json: ...


@dataclass
class _Tally:
    """What has been generated for one HTTP request."""

    began: float  # time.monotonic() when the request arrived
    sequences: Sequence[tuple[GenerateRequest, TextStream]]
    cached_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    last_text: dict[int, float] = field(default_factory=dict)  # sequence -> when its latest text came

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request, _ in self.sequences)

    @property
    def output_tokens(self) -> int:
        """So far: an answer that is cut short has a count too."""
        return sum(text.num_tokens for _, text in self.sequences)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class GenerationResponse(Response):
    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerationBody,
        sequences: Sequence[tuple[GenerateRequest, TextStream]],
        shape: AnswerShape,
    ) -> None:
        super().__init__()
        self._service = service
        self._request_id: str = request.state.request_id
        self._path = request.url.path
        self._stream = body.stream
        self._include_usage = body.include_usage
        self._sequences = sequences
        self._shape = shape
        self._tally = _Tally(request.state.began, sequences)
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
        async with self._service.client.generate(self._sequences) as updates:
            if self._stream:
                await self._send_events(updates, send)
            else:
                await self._send_whole(updates, send)

    async def _send_whole(self, updates: AsyncIterator[Update], send: Send) -> None:
        texts: list[list[str]] = [[] for _ in self._sequences]
        reasons = [""] * len(texts)
        async for update in updates:
            self._count(update)
            match update:
                case Delta(index, text):
                    texts[index].append(text)
                case Ended(index, reason):
                    reasons[index] = reason
        choices = [self._shape.whole(index, "".join(pieces), reasons[index]) for index, pieces in enumerate(texts)]
        content = msgspec.json.encode(
            self._envelope | {"object": self._shape.whole_object, "choices": choices, "usage": self._tally.usage()}
        )
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": content})
        self._record(Outcome.COMPLETED)

    async def _send_events(self, updates: AsyncIterator[Update], send: Send) -> None:
        outcome = Outcome.COMPLETED
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        try:
            if opening := self._shape.opening(len(self._sequences)):
                await send(self._event(opening))
            async for update in updates:
                self._count(update)
                match update:
                    case Delta(index, text):
                        await send(self._event([self._shape.piece(index, text)]))
                    case Ended(index, reason):
                        await send(self._event([self._shape.ending(index, reason)]))
            if self._include_usage:
                await send(self._event([], self._tally.usage()))
            last = b"data: [DONE]\n\n"
        except Exception as error:
            outcome = Outcome.FAILED
            api_error = to_api_error(error)
            log.error("%s failed: %s", self._request_id, error, exc_info=api_error.code == "internal_error")
            last = b"data: " + msgspec.json.encode(api_error.body) + b"\n\n"
        await send({"type": "http.response.body", "body": last})
        self._record(outcome)

    def _event(self, choices: list[Json], usage: Json | None = None) -> Json:
        """With include_usage every chunk has a usage, which is null in all but the last."""
        chunk = self._envelope | {"object": self._shape.chunk_object, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        data = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        return {"type": "http.response.body", "body": data, "more_body": True}

    def _count(self, update: Update) -> None:
        tally, metrics = self._tally, self._service.metrics
        match update:
            case Delta(index):
                now = time.monotonic()
                if index in tally.last_text:
                    metrics.inter_token.observe(now - tally.last_text[index])
                else:
                    metrics.time_to_first_token.observe(now - tally.began)
                tally.last_text[index] = now
            case Ended(index, reason, _, cached_tokens):
                tally.cached_tokens += cached_tokens
                tally.reasons.append(reason)
                metrics.count_prompt(len(self._sequences[index][0].prompt_ids), cached_tokens)

    def _record(self, outcome: Outcome) -> None:
        tally = self._tally
        seconds = time.monotonic() - tally.began
        self._service.metrics.count_request(outcome)
        self._service.metrics.request_seconds.observe(seconds)
        log.info(
            "%s %s %s: %d prompt tokens (%d cached), %d output tokens, %.3f s, %s",
            self._request_id,
            self._path,
            outcome,
            tally.prompt_tokens,
            tally.cached_tokens,
            tally.output_tokens,
            seconds,
            ",".join(tally.reasons) or "no finish reason",
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
