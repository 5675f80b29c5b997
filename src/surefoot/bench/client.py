"""One streamed request with as little work per event as possible: what the client takes, the server does not get."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

from surefoot.bench.results import RequestRecord
from surefoot.bench.workloads import Content

Messages = list[dict[str, str]]


class Target(Struct, frozen=True):
    """A server, and how it is asked."""

    url: str
    model: str
    chat: bool  # /v1/chat/completions instead of /v1/completions
    api_key: str  # empty: none is sent
    timeout: float  # seconds of one request
    exact: bool  # answers are to be as long as wanted: ignore_eos is sent


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class _Answer(asyncio.Protocol):
    """Reads a server-sent event stream, and notes when each piece of text came. Also the callbacks of the parser."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self.error = ""
        self._finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("broken stream")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("" if self._finished else "broken stream")

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            self.error = f"HTTP {status}"

    def on_body(self, body: bytes) -> None:
        if self.error:
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:])

    def on_message_complete(self) -> None:
        self._end("" if self._finished or self.error else "broken stream")

    def _event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self._finished = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.MsgspecError:
            self.error = self.error or "malformed event"
            return
        if chunk.error is not None:
            self.error = self.error or "error event"
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if text := choice.text or choice.delta.content:
                self.times.append(self._now)
                self.texts.append(text)

    def _end(self, error: str) -> None:
        self.error = self.error or error
        if not self.done.done():
            self.done.set_result(None)


async def ask(
    target: Target, prompt: Content | Messages, wanted_tokens: int, run_began: float
) -> tuple[RequestRecord, str]:
    """Returns how it went, and the text of the answer."""
    place = urlsplit(target.url)
    request = _request(target, place.path.rstrip("/"), place.netloc, prompt, wanted_tokens)
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    answer = _Answer(request)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(target.timeout):
            transport, _ = await loop.create_connection(
                lambda: answer,
                place.hostname or "",
                place.port or (443 if place.scheme == "https" else 80),
                ssl=place.scheme == "https" or None,
            )
            await answer.done
    except TimeoutError:
        answer.error = answer.error or "timeout"
    except OSError:
        answer.error = "no connection"
    finally:
        if transport is not None:
            transport.close()
    usage = answer.usage or _Usage(completion_tokens=len(answer.times))  # a server that does not count
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    times = answer.times
    if usage.completion_tokens and not times:
        answer.error = answer.error or "tokens without text"  # it counts what never came
    record = RequestRecord(
        began=began - run_began,
        ttft=times[0] - began if times else 0.0,
        total=time.perf_counter() - began,
        gaps=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=-1 if cached is None else cached,
        output_tokens=usage.completion_tokens or 0,
        wanted_tokens=wanted_tokens if target.exact else 0,
        error=answer.error,
    )
    return record, "".join(answer.texts)


def _request(target: Target, path: str, host: str, prompt: Content | Messages, wanted_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": wanted_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if target.exact else {}),
    }
    if target.chat:
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        body["prompt"] = prompt
    content = msgspec.json.encode(body)
    head = [
        f"POST {path}/v1/{'chat/' if target.chat else ''}completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    if target.api_key:
        head.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + content
