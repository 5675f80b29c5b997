"""The server without sockets: its application, called as a function, over an engine in a thread of this process.

async with InProcessServer(llm, plan) as server:
    answer = await server.post("/v1/completions", body)

What a body may hold and what comes back is the server's own doing: it is the same code.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from starlette.types import Message

from surefoot.config.engine_plan import ServerPlan
from surefoot.frontend.engine_client import EngineClient, EngineState
from surefoot.http.app import create_app
from surefoot.llm import LLM
from surefoot.protocol.messages import Abort, Command, EngineReady, Event, Stop, Submit


class Answer(Struct, frozen=True):
    status: int
    request_id: str
    body: bytes


class _Commands:
    """From the application to the engine's thread, until `Stop`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.is_open = True

    def send(self, messages: Sequence[Command]) -> None:
        for message in messages:
            self._queue.put(message)

    def drain(self, block: bool) -> list[Submit | Abort]:
        commands = [self._queue.get()] if block else []
        while not self._queue.empty():
            commands.append(self._queue.get())
        self.is_open = not any(isinstance(command, Stop) for command in commands)
        return [command for command in commands if not isinstance(command, Stop)]


class _Events:
    """From the engine's thread to the application, which lives in `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[list[Event]] = asyncio.Queue()

    def send(self, events: Sequence[Event]) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, list(events))

    async def receive(self) -> list[Event]:
        return await self._queue.get()


class InProcessServer:
    """To be made and used in one asyncio loop. Leaving it aborts what still runs; `llm` may be used afterwards."""

    def __init__(self, llm: LLM, plan: ServerPlan) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._commands = _Commands()
        self._events = _Events(self._loop)
        self.model_name = plan.engine.served_model_name
        self.client = EngineClient(self._commands, self._events)
        self._app = create_app(plan, llm.tokenizer, self.client)
        self._engine = threading.Thread(target=self._serve, name="engine")
        self._failures: list[BaseException] = []

    async def __aenter__(self) -> Self:
        self._receiving = asyncio.create_task(self.client.run())
        self._events.send([EngineReady(0.0, self._llm.scheduler.stats())])
        self._engine.start()
        while self.client.state is not EngineState.READY:
            await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.client.stop_engine()
        self._engine.join()
        self._receiving.cancel()

    async def post(self, path: str, body: bytes) -> Answer:
        """One request, JSON in and JSON out. Raises what ended the engine, if something did."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        request: list[Message] = [{"type": "http.request", "body": body}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # this client never leaves
            return request.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        if self._failures:
            raise self._failures[0]
        start = dict[bytes, Any](sent[0]["headers"])
        whole = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], start[b"x-request-id"].decode(), whole)

    def _serve(self) -> None:
        try:
            self._llm.serve(self._commands, self._events)
        except BaseException as error:
            self._failures.append(error)
            self._loop.call_soon_threadsafe(self.client.engine_died, str(error), False)
