"""The process tree of `surefoot serve`: a supervisor, which is this file, an engine and a frontend.

The supervisor resolves the plan, starts the children by module name, tells either of the other's death, and ends when
the first of these happens:

    SIGTERM or SIGINT      running requests finish within `drain_seconds`: exit 0; a second signal ends them at once
    the engine ends        open streams get their error event, the frontend drains: exit 4, or 3 if it was loading
    the frontend ends      the engine ends with it: the frontend's exit code

Children hang on a pipe from here: if the supervisor is killed, they see its end and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from surefoot.config.engine_plan import EnginePlan, ServerPlan
from surefoot.config.planning import plan_engine
from surefoot.config.resolve import server_plan
from surefoot.config.settings import Settings, limit_openmp_spinning
from surefoot.evidence import logs
from surefoot.protocol.control import (
    Drain,
    EngineDied,
    FrontendListening,
    FrontendReady,
    FrontendReport,
    StartEngine,
    StartFrontend,
    encode_line,
)

EXIT_OK, EXIT_CANNOT_LOAD, EXIT_ENGINE_DIED, EXIT_KILLED = 0, 3, 4, 130
KEPT_RECORDS = 8  # folders of earlier runs
CHILD_GRACE_SECONDS = 10.0  # for a child to end after it was told to

log = logging.getLogger("surefoot.launch")


def serve(settings: Settings, console: Console) -> int:
    """Runs a server until it is told to stop. Returns the exit code; raises ValueError if the plan cannot be made."""
    logs.set_up(settings.log_level)
    plan = server_plan(settings, plan_engine(settings, console))
    print_plan(plan.engine, console)
    limit_openmp_spinning()
    record_dir, lock = new_record_dir(Path(settings.record_dir).expanduser())
    with lock, tempfile.TemporaryDirectory(prefix="surefoot-") as sockets:
        return asyncio.run(Supervisor(plan, record_dir, Path(sockets), console).run())


def print_plan(plan: EnginePlan, console: Console) -> None:
    table = Table("setting", "value", "why", title=f"Plan for {escape(plan.served_model_name)}", title_justify="left")
    for reason in plan.reasons:
        table.add_row(reason.field, escape(reason.value), escape(reason.why))
    console.print(table)


def new_record_dir(parent: Path) -> tuple[Path, IO[str]]:
    """A folder for this run, and its lock, to be held while the server runs.

    Of the folders of servers that have ended, all but the newest KEPT_RECORDS are deleted.
    """
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=parent))
    lock = (made / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    by_age = sorted(parent.glob("run-*"), key=lambda folder: folder.stat().st_mtime_ns)
    for old in by_age[: -KEPT_RECORDS - 1]:
        with contextlib.suppress(OSError), (old / "lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its server still runs
            shutil.rmtree(old)
    return made, lock


class Supervisor:
    def __init__(self, plan: ServerPlan, record_dir: Path, sockets: Path, console: Console) -> None:
        self._plan = plan
        self._record_dir = record_dir
        self._commands, self._events = f"ipc://{sockets}/commands", f"ipc://{sockets}/events"
        self._console = console
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._ready = False
        self._url = ""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        frontend = await _spawn("surefoot.http.process", stdout=PIPE)
        engine = await _spawn("surefoot.engine.process", stdout=DEVNULL)
        reports = asyncio.create_task(self._read_reports(frontend))
        try:
            raw_plan = msgspec.Raw(msgspec.json.encode(self._plan))
            await _tell(frontend, StartFrontend(raw_plan, self._commands, self._events))
            raw_plan = msgspec.Raw(msgspec.json.encode(self._plan.engine))
            record_dir, log_level = str(self._record_dir), self._plan.log_level
            await _tell(engine, StartEngine(raw_plan, self._commands, self._events, record_dir, log_level))
            return await self._watch(frontend, engine)
        finally:
            await _end(engine)
            await _end(frontend)
            reports.cancel()

    async def _watch(self, frontend: Process, engine: Process) -> int:
        """Until the first end or signal, and then through the drain that follows it."""
        frontend_end = asyncio.create_task(frontend.wait())
        engine_end = asyncio.create_task(engine.wait())
        signalled = asyncio.create_task(self._signals.get())
        await asyncio.wait((frontend_end, engine_end, signalled), return_when=asyncio.FIRST_COMPLETED)
        if frontend_end.done():
            return _exit_code(frontend_end.result())
        if signalled.done():
            log.info("stopping: running requests have %g s to finish", self._plan.drain_seconds)
            await _tell(frontend, Drain())
            signalled = asyncio.create_task(self._signals.get())
            await self._wait_drained(frontend_end, engine_end, signalled)
        code = EXIT_OK
        if engine_end.done() and not frontend_end.done():
            code = await self._report_death(frontend, engine_end.result())
            await _tell(frontend, Drain())
        await self._wait_drained(frontend_end, signalled)
        if not frontend_end.done():
            log.warning("stopping at once")
            return EXIT_KILLED
        return code

    async def _wait_drained(self, *ends: asyncio.Task[int]) -> None:
        limit = self._plan.drain_seconds + CHILD_GRACE_SECONDS
        await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)

    async def _report_death(self, frontend: Process, returncode: int) -> int:
        """Tells the frontend, so that open streams end. Returns the server's exit code."""
        how = _how_it_ended(returncode)
        log.error("the engine %s; its last steps are in %s", how, self._record_dir)
        await _tell(frontend, EngineDied(f"the engine {how}", restarting=False))
        return EXIT_ENGINE_DIED if self._ready else EXIT_CANNOT_LOAD

    async def _read_reports(self, frontend: Process) -> None:
        assert frontend.stdout is not None
        decoder: msgspec.json.Decoder[FrontendReport] = msgspec.json.Decoder(FrontendReport)
        async for line in frontend.stdout:
            match decoder.decode(line):
                case FrontendListening(host, port):
                    self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                    log.info("listening on %s, waiting for the engine", self._url)
                case FrontendReady():
                    self._ready = True
                    self._say_ready()

    def _say_ready(self) -> None:
        name = self._plan.engine.served_model_name
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


async def _spawn(module: str, stdout: int) -> Process:
    """In a session of its own: Ctrl-C in a terminal reaches the supervisor alone."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=PIPE, stdout=stdout, start_new_session=True
    )


async def _tell(child: Process, message: msgspec.Struct) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(encode_line(message))
        await child.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has just ended: `_watch` sees that


async def _end(child: Process) -> None:
    """Closes the child's stdin, which ends it; kills it if it does not."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        await asyncio.wait_for(child.wait(), CHILD_GRACE_SECONDS)
    except TimeoutError:
        child.kill()
        await child.wait()


def _exit_code(returncode: int) -> int:
    """A signal's number becomes a shell's exit code."""
    return 128 - returncode if returncode < 0 else returncode


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
