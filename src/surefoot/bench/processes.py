"""The client as processes of their own: neither the progress bar nor one core's speed is in the numbers.

A process of load gets its work, says that it is ready, begins when told, and sends what it measured. All of them take
the sessions of a closed loop from one shared counter, so that many processes send what one would.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized

import msgspec
import uvloop
from msgspec import Struct

from surefoot.bench.client import Target
from surefoot.bench.load import closed_loop, open_loop
from surefoot.bench.results import RequestRecord, percentile
from surefoot.bench.workloads import Session

SOON = 0.02  # seconds from the word to begin to the beginning
TOLD_EVERY = 0.2  # seconds between news of progress
LAG_EVERY = 0.01  # seconds between looks at how late the event loop is


class LostProcessError(ValueError):
    """A process of the client is gone: killed, or out of memory."""

    def __init__(self) -> None:
        super().__init__("a process of the client has died: was it killed, or is memory short? --clients 1 needs least")


class Work(Struct, frozen=True):
    target: Target
    sessions: tuple[Session, ...]  # of a closed loop: all of them; of an open one: this process's
    clients: int  # 0: an open loop


class Measured(Struct, frozen=True):
    """What one process of load, or all together, measured."""

    records: tuple[RequestRecord, ...]
    busy: float  # share of the time for which it computed
    lag: float  # seconds by which it noticed an event late, the 99th percentile
    processes: int


class LoadProcesses:
    """A context manager. They wait between runs, and end when it does."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("spawn")  # a fork would copy the progress bar's thread in mid-air
        self._context = context
        self._taken = context.Value("q", 0)

    def __enter__(self) -> LoadProcesses:
        for _ in range(self._count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_main, args=(theirs, self._taken), daemon=True)
            process.start()
            theirs.close()  # else its death would not be noticed
            self._connections.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, target: Target, sessions: list[Session], clients: int, ended: Callable[[int], None]) -> Measured:
        """clients: 0 for an open loop. ended: told how many more requests have ended. Raises LostProcessError."""
        used = min(self._count, clients) if clients else self._count
        self._taken.value = 0
        for place, connection in enumerate(self._connections[:used]):
            share = tuple(sessions) if clients else tuple(sessions[place::used])
            self._send(connection, Work(target, share, clients // used + (place < clients % used)))
        for connection in self._connections[:used]:
            self._receive(connection)  # it is ready
        began = time.perf_counter() + SOON
        for connection in self._connections[:used]:
            self._send(connection, began)
        measured: list[Measured] = []
        waiting = set(self._connections[:used])
        while waiting:
            for connection in waiting.intersection(wait(list(waiting))):
                news = self._receive(connection)
                if isinstance(news, int):
                    ended(news)
                else:
                    measured.append(msgspec.msgpack.decode(news, type=Measured))
                    waiting.remove(connection)
        return Measured(
            tuple(sorted((record for one in measured for record in one.records), key=lambda record: record.began)),
            max(one.busy for one in measured),
            max(one.lag for one in measured),
            used,
        )

    def _send(self, connection: Connection, what: Work | float) -> None:
        try:
            connection.send(what)
        except OSError:
            raise LostProcessError from None

    def _receive(self, connection: Connection) -> int | bytes:
        try:
            news = connection.recv()
        except (EOFError, OSError):
            raise LostProcessError from None
        if isinstance(news, Exception):
            raise news
        assert isinstance(news, int | bytes)
        return news


def _main(connection: Connection, taken: Synchronized[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent says what becomes of it
    try:
        while True:
            work: Work = connection.recv()
            connection.send(0)
            began: float = connection.recv()
            try:
                measured = uvloop.run(_run(work, began, connection, taken))
            except* Exception as group:
                connection.send(group.exceptions[0])
            else:
                connection.send(msgspec.msgpack.encode(measured))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone


async def _run(work: Work, began: float, connection: Connection, taken: Synchronized[int]) -> Measured:
    records: list[RequestRecord] = []
    late: list[float] = []
    await asyncio.sleep(max(0.0, began - time.perf_counter()))
    cpu = time.process_time()
    watch = asyncio.create_task(_watch(late))
    tell = asyncio.create_task(_tell(records, connection))
    if work.clients:
        await closed_loop(work.target, _take(work.sessions, taken), work.clients, began, records.append)
    else:
        await open_loop(work.target, work.sessions, began, records.append)
    busy = (time.process_time() - cpu) / (time.perf_counter() - began)
    watch.cancel()
    tell.cancel()
    return Measured(tuple(records), busy, percentile(sorted(late), 0.99) if late else 0.0, 1)


def _take(sessions: tuple[Session, ...], taken: Synchronized[int]) -> Iterator[Session]:
    """Those that no other process has taken."""
    while True:
        with taken.get_lock():
            place = taken.value
            taken.value += 1
        if place >= len(sessions):
            return
        yield sessions[place]


async def _watch(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        late.append(max(0.0, time.perf_counter() - due))


async def _tell(records: list[RequestRecord], connection: Connection) -> None:
    told = 0
    while True:
        await asyncio.sleep(TOLD_EVERY)
        if len(records) > told:
            connection.send(len(records) - told)
            told = len(records)
