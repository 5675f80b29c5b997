"""The frontend's process: `python -m surefoot.http.process`, started by the supervisor.

It reads `StartFrontend` and then `EngineDied` and `Drain` as lines on stdin, and writes its reports as lines on stdout
(see protocol/control.py); logs go to stderr. It ends with 0 after a drain, with 2 if it cannot listen or cannot read
the tokenizer, and at once if stdin ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

import msgspec
import uvicorn
import uvloop
from msgspec import Struct

from surefoot.config.engine_plan import ServerPlan
from surefoot.evidence import logs
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.tokenizer import load_tokenizer
from surefoot.http.app import create_app
from surefoot.protocol.channel import AsyncReceiver, Sender
from surefoot.protocol.control import (
    Drain,
    EngineDied,
    FrontendCommand,
    FrontendListening,
    FrontendReady,
    StartFrontend,
    encode_line,
)
from surefoot.protocol.messages import Command, EngineReady, Event

EXIT_OK, EXIT_ORPHANED, EXIT_CANNOT_START = 0, 1, 2
MAX_LINE_BYTES = 16 * 1024 * 1024
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep idle connections: they should close first
CLOSE_SECONDS = 5  # for connections that are still open when everything has been answered

log = logging.getLogger("surefoot.http")


class Server(uvicorn.Server):
    """Leaves signals alone, since the supervisor speaks through stdin, and says when it listens."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            report(FrontendListening(*listener.getsockname()[:2]))


async def serve(lines: asyncio.StreamReader, start: StartFrontend, plan: ServerPlan) -> int:
    try:
        listener = listen(plan.host, plan.port)
        tokenizer = load_tokenizer(plan.engine.checkpoint)
    except (OSError, ValueError) as error:
        log.error("%s", error)
        return EXIT_CANNOT_START
    sender: Sender[Command] = Sender(start.command_address)
    receiver: AsyncReceiver[Event] = AsyncReceiver(start.event_address, Event)
    client = EngineClient(sender, receiver)
    client.subscribe(_report_ready)
    config = uvicorn.Config(
        create_app(plan, tokenizer, client),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = Server(config)
    async with asyncio.TaskGroup() as group:
        helpers = [
            group.create_task(client.run()),
            group.create_task(follow(lines, client, server, plan.drain_seconds)),
        ]
        await server.serve([listener])
        for helper in helpers:
            helper.cancel()
    client.stop_engine()
    sender.close()
    receiver.close()
    return EXIT_OK


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError with a message that names the address and the way out."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {os.strerror(error.errno) if error.errno else error}. "
            "Choose another with --host or --port (0 takes a free one)"
        ) from error


async def follow(lines: asyncio.StreamReader, client: EngineClient, server: Server, drain_seconds: float) -> None:
    """Obeys the supervisor, until cancelled."""

    async def drain() -> None:
        await client.wait_idle(drain_seconds)
        server.should_exit = True

    decoder: msgspec.json.Decoder[FrontendCommand] = msgspec.json.Decoder(FrontendCommand)
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            match decoder.decode(line):
                case EngineDied(detail, restarting):
                    client.engine_died(detail, restarting)
                case Drain():
                    log.info("draining: running requests have %g s", drain_seconds)
                    client.begin_drain()
                    group.create_task(drain())
                case StartFrontend():
                    raise ValueError("StartFrontend came twice")
                case unreachable:
                    assert_never(unreachable)
        os._exit(EXIT_ORPHANED)  # no clean end without the supervisor: nobody would end a slow one


def report(message: Struct) -> None:
    sys.stdout.buffer.write(encode_line(message))
    sys.stdout.buffer.flush()


def _report_ready(event: Event) -> None:
    if isinstance(event, EngineReady):
        log.info("the engine is ready after %.1f s", event.load_seconds)
        report(FrontendReady(event.load_seconds))


async def run() -> int:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    start = msgspec.json.decode(await lines.readline(), type=StartFrontend)
    plan = msgspec.json.decode(start.plan, type=ServerPlan)
    logs.set_up(plan.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return await serve(lines, start, plan)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
