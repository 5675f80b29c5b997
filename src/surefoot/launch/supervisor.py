"""Starts the engine and the frontend, and keeps them running.

    the engine dies        open requests get their error, the frontend turns new ones away until another engine is ready
    the frontend dies      its requests are aborted; the engine keeps its weights and its prefix cache; connections wait
                           in the backlog of the socket, which the supervisor holds open, for another frontend
    either dies too often  the server gives up: exit 5
    SIGTERM or SIGINT      running requests finish within `drain_seconds`: exit 0; a second signal ends them at once

An engine whose loop stands still is killed, and so dies. Each death makes new channels between the two: what was sent
to the dead one, or by it, reaches nobody.

Children hang on a pipe from here: if the supervisor is killed, they see its end and exit;
one that cannot is killed by the kernel.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
from rich.console import Console

from surefoot.config.engine_plan import ServerPlan
from surefoot.launch.child import Child, exit_code
from surefoot.launch.records import new_ring
from surefoot.launch.restarts import GiveUp, Restart, RestartRule
from surefoot.protocol.control import (
    Connect,
    Drain,
    EngineBeat,
    EngineDied,
    EngineLoaded,
    EngineReport,
    Failed,
    FrontendListening,
    FrontendReady,
    FrontendReport,
    StartEngine,
    StartFrontend,
)

EXIT_OK, EXIT_CANNOT_LOAD, EXIT_ENGINE_DIED, EXIT_CRASH_LOOP, EXIT_KILLED = 0, 3, 4, 5, 130
WEDGED_SECONDS = 300  # without a beat of a loaded engine; a long step on a slow CPU may take a minute
DRAIN_GRACE_SECONDS = 10.0  # for the frontend to end after the time that it was given
LAST_WORDS_SECONDS = 2.0  # after a second signal
REQUEST_IDS = 1 << 32  # per frontend

log = logging.getLogger("surefoot.launch")


class Role(StrEnum):
    FRONTEND = "frontend"
    ENGINE = "engine"


MODULES = {Role.FRONTEND: "surefoot.http.process", Role.ENGINE: "surefoot.engine.process"}
REPORTS = {Role.FRONTEND: FrontendReport, Role.ENGINE: EngineReport}


@dataclass(frozen=True)
class Signalled:
    pass


@dataclass(frozen=True)
class Said:
    role: Role
    report: FrontendReport | EngineReport


@dataclass(frozen=True)
class Ended:
    role: Role
    returncode: int


@dataclass(frozen=True)
class RestartDue:
    role: Role


News = Signalled | Said | Ended | RestartDue


class Supervisor:
    def __init__(
        self, plan: ServerPlan, listener: socket.socket, record_dir: Path, sockets: Path, console: Console
    ) -> None:
        """listener: bound; the frontend listens. sockets: a folder for the sockets of ZeroMQ."""
        self._plan = plan
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._record_dir = record_dir
        self._sockets = sockets
        self._console = console
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._children: dict[Role, Child] = {}  # that live
        self._tasks = asyncio.TaskGroup()
        self._rules = {role: RestartRule(plan.max_restarts) for role in Role}
        self._starts = {role: itertools.count() for role in Role}
        self._causes: dict[Role, Failed] = {}  # of the death of a child that is about to die: a predicate, and a trace
        self._links = itertools.count()
        self._link = self._new_link()
        self._engine_started = 0.0  # time of the event loop
        self._start_seconds = 0.0  # from the start of the last engine that loaded until it had
        self._silent_seconds = 0  # since the last beat
        self._announced = False

    async def run(self) -> int:
        """Until the server ends. Returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._news.put_nowait, Signalled())
        async with self._tasks:
            watchdog = self._tasks.create_task(self._kill_if_wedged())
            try:
                await self._start(Role.FRONTEND)
                await self._start(Role.ENGINE)
                code = await self._serve()
                self._listener.close()
                return await self._drain(code)
            finally:
                watchdog.cancel()
                await asyncio.gather(*(child.end() for child in self._children.values()))

    async def _serve(self) -> int:
        """Until a signal comes, or starting again is no use. Returns the exit code, for after the drain."""
        while True:
            match await self._news.get():
                case Signalled():
                    return EXIT_OK
                case RestartDue(role):
                    await self._start(role)
                case Said(role, report):
                    self._hear(role, report)
                case Ended(role, returncode):
                    match self._rules[role].died(asyncio.get_running_loop().time()):
                        case Restart(delay):
                            self._prepare_restart(role, returncode, delay)
                        case GiveUp() as verdict:
                            return self._give_up(role, returncode, verdict)

    async def _drain(self, code: int) -> int:
        """The frontend lets running requests end. Returns the exit code: that of a stop at once, else `code` unless it
        is 0, else that of the first death here."""
        seconds = self._plan.drain_seconds
        now = asyncio.get_running_loop().time
        self._tell(Role.FRONTEND, Drain(seconds))
        deadline = now() + seconds + DRAIN_GRACE_SECONDS
        while Role.FRONTEND in self._children:
            try:
                async with asyncio.timeout_at(deadline):
                    news = await self._news.get()
            except TimeoutError:
                log.warning("stopping at once")
                return EXIT_KILLED
            match news:
                case Signalled():
                    code = EXIT_KILLED
                    self._tell(Role.FRONTEND, Drain(0))
                    deadline = min(deadline, now() + LAST_WORDS_SECONDS)
                case Said(role, report):
                    self._hear(role, report)
                case Ended(role, 0):  # as it was told
                    del self._children[role]
                case Ended(role, returncode):
                    how = self._bury(role, returncode, " while the server drained")
                    self._tell(Role.FRONTEND, EngineDied(how, restarting=False, retry_seconds=0))
                    code = code or (EXIT_ENGINE_DIED if role is Role.ENGINE else exit_code(returncode))
        return code

    async def _start(self, role: Role) -> None:
        number = next(self._starts[role])
        start: StartFrontend | StartEngine
        if role is Role.FRONTEND:
            inherited = [self._listener.fileno()]
            raw_plan = msgspec.Raw(msgspec.json.encode(self._plan))
            start = StartFrontend(raw_plan, self._listener.fileno(), number * REQUEST_IDS + 1)
        else:
            inherited = []
            raw_plan = msgspec.Raw(msgspec.json.encode(self._plan.engine))
            ring = new_ring(self._record_dir, number)
            start = StartEngine(raw_plan, str(ring), self._plan.log_level, self._plan.log_format)
            self._engine_started = asyncio.get_running_loop().time()
        child = self._children[role] = await Child.start(MODULES[role], inherited)
        child.tell(start)
        child.tell(self._link)
        self._tasks.create_task(self._follow(role, child))

    async def _follow(self, role: Role, child: Child) -> None:
        async for report in child.reports(REPORTS[role]):
            self._news.put_nowait(Said(role, report))
        self._news.put_nowait(Ended(role, await child.wait()))

    def _hear(self, role: Role, report: FrontendReport | EngineReport) -> None:
        if role is Role.ENGINE:
            self._silent_seconds = 0
        match report:
            case FrontendListening():
                self._rules[role].came_up()
                log.info("listening on %s, waiting for the engine", self._url)
            case FrontendReady():
                self._say_ready()
            case EngineLoaded():
                self._rules[role].came_up()
                self._start_seconds = asyncio.get_running_loop().time() - self._engine_started
            case EngineBeat():
                pass
            case Failed(detail, trace):
                self._causes[role] = Failed(("failed: " if trace else "cannot start: ") + detail, trace)

    def _prepare_restart(self, role: Role, returncode: int, delay: float) -> None:
        """Tells the survivor, and gives it other channels, on which it waits for the next one."""
        how = self._bury(role, returncode, f"; another one starts {f'in {delay:g} s' if delay else 'now'}")
        self._link = self._new_link()
        if role is Role.ENGINE:
            seconds = math.ceil(delay + self._start_seconds)
            self._tell(Role.FRONTEND, EngineDied(how, restarting=True, retry_seconds=seconds))
        for survivor in self._children.values():
            survivor.tell(self._link)
        asyncio.get_running_loop().call_later(delay, self._news.put_nowait, RestartDue(role))

    def _give_up(self, role: Role, returncode: int, verdict: GiveUp) -> int:
        """Tells the frontend, if there is one. Returns the exit code."""
        how = self._bury(role, returncode, verdict.how_often)
        self._tell(Role.FRONTEND, EngineDied(how, restarting=False, retry_seconds=0))
        if verdict.in_loop:
            return EXIT_CRASH_LOOP
        if role is Role.FRONTEND:
            return exit_code(returncode)
        return EXIT_ENGINE_DIED if self._rules[role].ever_came_up else EXIT_CANNOT_LOAD

    def _bury(self, role: Role, returncode: int, remark: str) -> str:
        """Writes the cause of a death to the log, and returns it as a line."""
        child = self._children.pop(role)
        cause = self._causes.pop(role, Failed(child.how_it_ended(returncode), ""))
        first, *more = [*cause.detail.splitlines(), *cause.trace.splitlines()]
        log.error("%s", "\n".join([f"the {role} {first}{remark}", *more]))
        return f"the {role} {first}"

    def _tell(self, role: Role, message: msgspec.Struct) -> None:
        if role in self._children:
            self._children[role].tell(message)

    def _new_link(self) -> Connect:
        number = next(self._links)
        with suppress(OSError):  # the children say why they cannot bind
            self._sockets.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have cleaned up
        return Connect(f"ipc://{self._sockets}/commands-{number}", f"ipc://{self._sockets}/events-{number}")

    async def _kill_if_wedged(self) -> None:
        """It counts its own seconds, so time does not count in which this process was stopped as well."""
        while True:
            await asyncio.sleep(1)
            self._silent_seconds += 1
            engine = self._children.get(Role.ENGINE)
            if engine and self._rules[Role.ENGINE].is_up and self._silent_seconds == WEDGED_SECONDS:
                self._causes[Role.ENGINE] = Failed(f"made no step for {WEDGED_SECONDS} s and was killed", "")
                engine.kill()

    def _say_ready(self) -> None:
        name = self._plan.engine.served_model_name
        if self._announced or self._plan.log_format == "json":
            log.info("ready: %s at %s/v1", name, self._url)
            return
        self._announced = True
        body = {
            "model": name,
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        key = "-H 'Authorization: Bearer YOUR_KEY' " if self._plan.api_key else ""
        lines = (
            f"\nReady: {name} at {self._url}/v1. Try:\n",
            f"curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' {key}\\",
            f"  -d '{msgspec.json.encode(body).decode()}'\n\nCtrl-C stops the server.",
        )
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
