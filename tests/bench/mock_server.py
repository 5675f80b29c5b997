"""An OpenAI-compatible server that answers at once, or as slowly and as wrongly as a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    first_delay: float = 0.0  # seconds before the first token
    gap: float = 0.0  # between tokens; 0 sends all at once, one event each
    slots: int = 1 << 30  # answers that are made at once; others wait
    status: int = 200
    cut_after: int = -1  # tokens after which the connection is closed
    error_after: int = -1  # tokens after which an error event comes
    stall_from: int = 1 << 30  # requests, from which on no answer comes
    short_by: int = 0  # tokens that answers lack
    cached_share: float = 0.0  # of prompt tokens
    usage: bool = True
    metrics: bool = True  # else hits are told with each answer
    silent: bool = False  # counts tokens that it does not send
    reason: str = " No"  # after the status; HTTP lets it be empty
    seen: list[dict[str, Any]] = field(default_factory=list)


class MockServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.prompt_tokens = self.cached_tokens = 0
        self.url = ""

    def __enter__(self) -> MockServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._slots = asyncio.Semaphore(self.behaviour.slots)
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, backlog=1000)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        try:
            if method == "GET":
                self._tell(path, writer)
            else:
                async with self._slots:
                    await self._answer(json.loads(body), path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        writer.close()

    def _tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        content = {
            "/v1/models": json.dumps({"data": [{"id": "mock"}]}),
            "/version": json.dumps({"version": "1.2"}),
            "/metrics": f'vllm:prefix_cache_queries_total{{a="b"}} {self.prompt_tokens}\n'
            f'vllm:prefix_cache_hits_total{{a="b"}} {self.cached_tokens}\n'
            if self.behaviour.metrics
            else "",
        }.get(path)
        status = "404 Not Found" if content is None else "200 OK"
        content = content or "{}"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())

    async def _answer(self, body: dict[str, Any], path: str, writer: asyncio.StreamWriter) -> None:
        how = self.behaviour
        how.seen.append(body)
        if len(how.seen) > how.stall_from:
            await asyncio.sleep(60)
        if how.status != 200:
            writer.write(f"HTTP/1.1 {how.status}{how.reason}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            return
        chat = path.endswith("chat/completions")
        prompt = str(body["messages"]).split() if chat else body["prompt"]
        prompt_tokens = len(prompt if isinstance(prompt, list) else prompt.split())
        cached = int(how.cached_share * prompt_tokens)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        event = _event({"choices": [{"delta": {"content": "word "}} if chat else {"text": "word "}]})
        wanted = body["max_tokens"] - how.short_by
        if how.first_delay:
            await asyncio.sleep(how.first_delay)
        if how.silent:
            pass
        elif not how.gap and how.cut_after < 0 and how.error_after < 0:
            writer.write(event * wanted)
        else:
            began = time.perf_counter()
            for token in range(wanted):
                if token == how.cut_after:
                    return
                if token == how.error_after:
                    writer.write(_event({"error": {"message": "broken"}}) + b"0\r\n\r\n")
                    return
                writer.write(event)
                await asyncio.sleep(max(0.0, began + (token + 1) * how.gap - time.perf_counter()))
        if how.usage:
            usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": wanted}
            if not how.metrics:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            writer.write(_event({"choices": [], "usage": usage}))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(content: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
