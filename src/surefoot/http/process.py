"""The frontend's process: `python -m surefoot.http.process`, started by the supervisor.

It reads `StartFrontend` and then `Connect`, `EngineDied` and `Drain` as lines on stdin, and writes its reports as lines
on stdout (see protocol/control.py); logs go to stderr. It ends with 0 after a drain, with 2 if it cannot read the
tokenizer, and at once if stdin ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

import msgspec
import uvicorn
import uvloop

from surefoot.config.engine_plan import ServerPlan
from surefoot.evidence import logs
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from surefoot.http.app import create_app
from surefoot.protocol.channel import AsyncReceiver, Sender
from surefoot.protocol.child import Reports, begin_child
from surefoot.protocol.control import (
    MAX_LINE_BYTES,
    Connect,
    Drain,
    EngineDied,
    Failed,
    FrontendCommand,
    FrontendListening,
    FrontendReady,
    StartFrontend,
)
from surefoot.protocol.messages import Command, EngineReady, Event

EXIT_OK, EXIT_FAILED, EXIT_CANNOT_START = 0, 1, 2
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep idle connections: they should close first
CLOSE_SECONDS = 5  # for connections that are still open when everything has been answered

log = logging.getLogger("surefoot.http")


class Server(uvicorn.Server):
    """Leaves signals alone, since the supervisor speaks through stdin, and says when it listens."""

    def __init__(self, config: uvicorn.Config, reports: Reports) -> None:
        super().__init__(config)
        self._reports = reports

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._reports.send(FrontendListening())


class EngineLink:
    """The client of the engine, and the channels to the engine that is alive. Another engine gets other channels."""

    def __init__(self, connect: Connect, first_request_id: int, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._open(connect)
        self.client = EngineClient(self._sender, self._receiver, first_request_id)
        self._receiving = group.create_task(self.client.run())

    def engine_died(self, died: EngineDied) -> None:
        """What the dead engine still had to say is not heard: it must not be taken for the next one's."""
        self._receiving.cancel()
        self.client.engine_died(died.detail, died.restarting, died.retry_seconds)

    def connect(self, connect: Connect) -> None:
        self._receiving.cancel()
        self._sender.close(linger=False)
        self._receiver.close()
        self._open(connect)
        self.client.connect(self._sender, self._receiver)
        self._receiving = self._group.create_task(self.client.run())

    def close(self) -> None:
        """Tells the engine to end."""
        self._receiving.cancel()
        self.client.stop_engine()
        self._sender.close()
        self._receiver.close()

    def _open(self, connect: Connect) -> None:
        self._sender: Sender[Command] = Sender(connect.command_address)
        self._receiver: AsyncReceiver[Event] = AsyncReceiver(connect.event_address, Event)


async def serve(
    lines: asyncio.StreamReader, reports: Reports, start: StartFrontend, plan: ServerPlan, tokenizer: Tokenizer
) -> None:
    """Answers HTTP until it has drained."""
    connect = msgspec.json.decode(await lines.readline(), type=Connect)
    async with asyncio.TaskGroup() as group:
        link = EngineLink(connect, start.first_request_id, group)
        link.client.subscribe(lambda event: reports.send(FrontendReady()) if isinstance(event, EngineReady) else None)
        config = uvicorn.Config(
            create_app(plan, tokenizer, link.client),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        server = Server(config, reports)
        following = group.create_task(follow(lines, link, server))
        await server.serve([socket.socket(fileno=start.listener)])
        following.cancel()
        link.close()


async def follow(lines: asyncio.StreamReader, link: EngineLink, server: Server) -> None:
    """Obeys the supervisor, until cancelled."""

    async def drain(seconds: float) -> None:
        await link.client.wait_idle(seconds)
        server.should_exit = True

    decoder: msgspec.json.Decoder[FrontendCommand] = msgspec.json.Decoder(FrontendCommand)
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            match decoder.decode(line):
                case EngineDied() as died:
                    link.engine_died(died)
                case Connect() as connect:
                    link.connect(connect)
                case Drain(seconds):
                    log.info("draining: running requests have %g s", seconds)
                    link.client.begin_drain()
                    group.create_task(drain(seconds))
                case StartFrontend():
                    raise ValueError("StartFrontend came twice")
                case unreachable:
                    assert_never(unreachable)
        os._exit(EXIT_FAILED)  # no clean end without the supervisor: nobody would end a slow one


async def run(reports: Reports) -> int:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    start = msgspec.json.decode(await lines.readline(), type=StartFrontend)
    plan = msgspec.json.decode(start.plan, type=ServerPlan)
    logs.set_up(plan.log_level, plan.log_format, "frontend")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        tokenizer = load_tokenizer(plan.engine.checkpoint)
    except (OSError, ValueError) as error:
        reports.send(Failed(str(error), ""))
        return EXIT_CANNOT_START
    await serve(lines, reports, start, plan, tokenizer)
    return EXIT_OK


def main() -> int:
    reports = begin_child()
    try:
        return uvloop.run(run(reports))
    except Exception as error:
        reports.fail(error)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
