"""The engine's process: `python -m surefoot.engine.process`, started by the supervisor.

It is told its plan by one line on stdin, says on the event channel when it is ready, and serves until its inbox is
closed by `Stop`. End of file on stdin means that the supervisor is gone, or wants it gone: it exits at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from surefoot.config.engine_plan import EnginePlan
from surefoot.engine.executor import ThreadExecutor
from surefoot.engine.flight_recorder import FlightRecorder
from surefoot.engine.loop import run
from surefoot.evidence import logs
from surefoot.protocol.channel import Receiver, Sender
from surefoot.protocol.control import StartEngine
from surefoot.protocol.messages import Abort, Command, EngineReady, Event, Stop, Submit
from surefoot.runner.model_runner import ModelRunner
from surefoot.scheduler.scheduler import Scheduler

EXIT_OK, EXIT_CANNOT_LOAD = 0, 3
IDLE_POLL_SECONDS = 60.0
PROGRESS_SECONDS = 2.0

log = logging.getLogger("surefoot.engine")


class ChannelInbox:
    """Commands of the frontend, until it sends `Stop`."""

    def __init__(self, receiver: Receiver[Command]) -> None:
        self._receiver = receiver
        self.is_open = True

    def drain(self, block: bool) -> Iterable[Submit | Abort]:
        commands = self._receiver.drain(IDLE_POLL_SECONDS if block else 0)
        self.is_open = self.is_open and not any(isinstance(command, Stop) for command in commands)
        return [command for command in commands if not isinstance(command, Stop)]


class LoadProgress:
    """Says every few seconds how far the weights are; says nothing when they are quick."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            log.info("loading weights: %d of %d", done, total)


def load(start: StartEngine) -> Callable[[], None]:
    """Makes everything. Returns the loop, to be entered; raises ValueError for a checkpoint or a plan that is wrong."""
    plan = msgspec.json.decode(start.plan, type=EnginePlan)
    began = time.monotonic()
    events: Sender[Event] = Sender(start.event_address)
    inbox = ChannelInbox(Receiver(start.command_address, Command))
    scheduler = Scheduler(plan.bounds, plan.prefix_cache)
    recorder = FlightRecorder(Path(start.record_dir) / "steps.ring")
    executor = ThreadExecutor(lambda: ModelRunner(plan, LoadProgress()), recorder)
    seconds = time.monotonic() - began
    log.info("weights loaded in %.1f s, %d threads", seconds, plan.num_threads)
    events.send([EngineReady(seconds, scheduler.stats())])
    return lambda: run(inbox, scheduler, executor, events, plan.lookahead)


def main() -> int:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the supervisor decides when the engine ends
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartEngine)
    logs.set_up(start.log_level)
    threading.Thread(target=_exit_with_supervisor, daemon=True).start()
    try:
        serve = load(start)
    except ValueError as error:
        log.error("%s", error)
        return EXIT_CANNOT_LOAD
    serve()
    return EXIT_OK


def _exit_with_supervisor() -> None:
    """Reads the descriptor itself: a thread inside sys.stdin would hold its lock while the interpreter ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
