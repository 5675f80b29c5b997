"""The engine's process: `python -m surefoot.engine.process`, started by the supervisor.

It is told its plan and its channels by lines on stdin, says on stdout when it has loaded and then every few seconds
that its loop goes round (see protocol/control.py), and serves until its inbox is closed by `Stop`. Another `Connect`
means that another frontend has taken over. End of file on stdin means that the supervisor is gone, or wants it gone:
it exits at once.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue

import msgspec

from surefoot.config.engine_plan import EnginePlan
from surefoot.engine.executor import OUT_OF_MEMORY, ThreadExecutor, is_out_of_memory
from surefoot.engine.flight_recorder import FlightRecorder
from surefoot.engine.loop import run
from surefoot.evidence import logs
from surefoot.protocol.channel import Receiver, Sender
from surefoot.protocol.child import Reports, begin_child
from surefoot.protocol.control import Connect, EngineBeat, EngineCommand, EngineLoaded, Failed, StartEngine
from surefoot.protocol.messages import Abort, Command, EngineReady, Event, Stop, Submit
from surefoot.runner.model_runner import ModelRunner
from surefoot.scheduler.scheduler import Scheduler

EXIT_OK, EXIT_FAILED, EXIT_CANNOT_LOAD = 0, 1, 3
IDLE_POLL_SECONDS = 0.5  # for which an idle engine may not see that it has another frontend
BEAT_SECONDS = 5.0
PROGRESS_SECONDS = 2.0

log = logging.getLogger("surefoot.engine")


class SupervisorLines(threading.Thread):
    """Reads what the supervisor says, and ends this process when it has gone.

    It reads the descriptor itself: a thread inside sys.stdin would hold its lock while the interpreter ends.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.commands: SimpleQueue[EngineCommand] = SimpleQueue()

    def run(self) -> None:
        decoder: msgspec.json.Decoder[EngineCommand] = msgspec.json.Decoder(EngineCommand)
        rest = b""
        while data := os.read(sys.stdin.fileno(), 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.commands.put(decoder.decode(line))
        os._exit(EXIT_OK)


class FrontendLink:
    """Inbox and outbox of the loop: the channels to the frontend that is alive.

    Another frontend gets other channels, and the requests of the former one are aborted.
    """

    def __init__(
        self, supervisor: SupervisorLines, reports: Reports, scheduler: Scheduler, load_seconds: float
    ) -> None:
        self._supervisor = supervisor
        self._reports = reports
        self._scheduler = scheduler
        self._load_seconds = load_seconds
        self._last_beat = time.monotonic()
        self._connect()
        self.is_open = True

    def drain(self, block: bool) -> Iterable[Submit | Abort]:
        """What the frontend has sent, until it sends `Stop`."""
        self._beat()
        if not self._supervisor.commands.empty():
            self._events.close(linger=False)
            self._commands.close()
            self._connect()
            return [Abort(request_id) for request_id in self._scheduler.live]
        commands = self._commands.drain(IDLE_POLL_SECONDS if block else 0)
        self.is_open = self.is_open and not any(isinstance(command, Stop) for command in commands)
        return [command for command in commands if not isinstance(command, Stop)]

    def send(self, events: Sequence[Event]) -> None:
        self._events.send(events)

    def _connect(self) -> None:
        command = self._supervisor.commands.get()
        assert isinstance(command, Connect), command
        self._commands: Receiver[Command] = Receiver(command.command_address, Command)
        self._events: Sender[Event] = Sender(command.event_address)
        self.send([EngineReady(self._load_seconds, self._scheduler.stats())])

    def _beat(self) -> None:
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._reports.send(EngineBeat())


class LoadProgress:
    """Says every few seconds how far the weights are; says nothing when they are quick."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            log.info("loading weights: %d of %d", done, total)


def serve(start: StartEngine, supervisor: SupervisorLines, reports: Reports) -> int:
    """Loads, then runs the loop until the frontend stops it. Returns the exit code."""
    plan = msgspec.json.decode(start.plan, type=EnginePlan)
    began = time.monotonic()
    scheduler = Scheduler(plan.bounds, plan.prefix_cache)
    try:
        recorder = open_recorder(Path(start.ring))
        executor = ThreadExecutor(lambda: ModelRunner(plan, LoadProgress()), recorder)
    except (ValueError, OSError, MemoryError) as error:  # of checkpoint, plan, folder or machine: it has the way out
        reports.send(Failed(str(error), ""))
        return EXIT_CANNOT_LOAD
    seconds = time.monotonic() - began
    log.info("weights loaded in %.1f s, %d threads", seconds, plan.num_threads)
    reports.send(EngineLoaded())
    link = FrontendLink(supervisor, reports, scheduler, seconds)
    run(link, scheduler, executor, link, plan.lookahead)
    return EXIT_OK


def open_recorder(ring: Path) -> FlightRecorder:
    """Raises OSError with the way out."""
    try:
        return FlightRecorder(ring)
    except OSError as error:
        raise OSError(f"{ring} cannot be made: {error.strerror}. Choose another folder with --record-dir") from error


def main() -> int:
    reports = begin_child()
    supervisor = SupervisorLines()
    supervisor.start()
    start = supervisor.commands.get()
    assert isinstance(start, StartEngine), start
    logs.set_up(start.log_level, start.log_format, "engine")
    try:
        return serve(start, supervisor, reports)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(OUT_OF_MEMORY)
        reports.fail(error)
        os._exit(EXIT_FAILED)  # at once: a step that still runs would be waited for


if __name__ == "__main__":
    sys.exit(main())
