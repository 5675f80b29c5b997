"""The process tree of `surefoot serve`: a supervisor, an engine and a frontend.

__init__     the way in: makes the plan, binds the port, runs the supervisor
supervisor   starts the children, tells either of the other's death, starts again what died, drains, ends
restarts     the rule by which a process is started again, or the server gives up
child        one process and the pipes to it
limits       what each process is allowed: open files, memory
records      the folder in which a run keeps its flight recorder's rings
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from surefoot.config.engine_plan import EnginePlan
from surefoot.config.planning import plan_engine
from surefoot.config.resolve import server_plan
from surefoot.config.settings import Settings
from surefoot.evidence import logs
from surefoot.launch.limits import raise_file_limit
from surefoot.launch.records import new_record_dir
from surefoot.launch.supervisor import (
    EXIT_CANNOT_LOAD,
    EXIT_CRASH_LOOP,
    EXIT_ENGINE_DIED,
    EXIT_KILLED,
    EXIT_OK,
    Supervisor,
)

EXIT_CANNOT_START = 2  # what the command line makes of an exception
LONGEST_SOCKET_PARENT = 70  # bytes, before the names of a folder and a socket: the kernel takes 107 in all

__all__ = [
    "EXIT_CANNOT_LOAD",
    "EXIT_CANNOT_START",
    "EXIT_CRASH_LOOP",
    "EXIT_ENGINE_DIED",
    "EXIT_KILLED",
    "EXIT_OK",
    "new_record_dir",
    "serve",
]

log = logging.getLogger("surefoot.launch")


def serve(settings: Settings, console: Console) -> int:
    """Runs a server until it is told to stop. Returns the exit code.

    Raises ValueError if the plan cannot be made, OSError if the port or the record folder cannot be had; with a log of
    JSON objects they are written there.
    """
    logs.set_up(settings.log_level, settings.log_format, "supervisor")
    if settings.log_format == "text":
        return _serve(settings, console)
    try:
        return _serve(settings, Console(quiet=True))
    except (ValueError, OSError, MemoryError) as error:
        log.error("%s", error)
        return EXIT_CANNOT_START


def _serve(settings: Settings, console: Console) -> int:
    with bind(settings.host, settings.port) as listener:  # first: a plan may take a download
        plan = server_plan(settings, plan_engine(settings, console))
        print_plan(plan.engine, console)
        raise_file_limit(plan.engine.bounds.max_running_requests + plan.engine.bounds.max_queued_requests)
        with (
            new_record_dir(Path(settings.record_dir).expanduser()) as record_dir,
            tempfile.TemporaryDirectory(prefix="surefoot-", dir=socket_parent()) as sockets,
        ):
            return asyncio.run(Supervisor(plan, listener, record_dir, Path(sockets), console).run())


def socket_parent() -> str:
    """Where temporary files go, or /tmp if that is too long for the path of a socket."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= LONGEST_SOCKET_PARENT else "/tmp"


def print_plan(plan: EnginePlan, console: Console) -> None:
    table = Table("setting", "value", "why", title=f"Plan for {escape(plan.served_model_name)}", title_justify="left")
    for reason in plan.reasons:
        table.add_row(reason.field, escape(reason.value), escape(reason.why))
    console.print(table)


def bind(host: str, port: int) -> socket.socket:
    """Takes the port. The first frontend listens there; the socket outlives it.

    Raises OSError with a message that names the address and the way out.
    """
    is_v6 = ":" in host
    listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_v6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {host} port {port}: {os.strerror(error.errno) if error.errno else error}. "
            "Choose another with --host or --port (0 takes a free one)"
        ) from error
    return listener
