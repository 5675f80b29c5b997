"""The engine's loop: commands in, one step, events out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from surefoot.protocol.messages import Abort, Event, Submit
from surefoot.protocol.step_plan import StepPlan, StepResult
from surefoot.scheduler.scheduler import Scheduler


class Inbox(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether more commands may come."""

    def drain(self, block: bool) -> Iterable[Submit | Abort]:
        """All commands that are there; with `block`, waits for the first one or for the end."""


class Outbox(Protocol):
    def send(self, events: Sequence[Event]) -> None: ...


class Launched(Protocol):
    @property
    def plan(self) -> StepPlan: ...

    def wait(self) -> StepResult:
        """The only host synchronisation of a step. A failure is a value."""


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Launched: ...


def run(inbox: Inbox, scheduler: Scheduler, executor: Executor, outbox: Outbox, lookahead: int) -> None:
    """Plan step N+1 while step N runs. `lookahead=0` is the same loop without the overlap.

    Returns when the inbox has closed and every request has ended.
    """
    in_flight: Launched | None = None
    while inbox.is_open or scheduler.has_work or in_flight is not None:
        for command in inbox.drain(block=in_flight is None and not scheduler.has_work):
            outbox.send(scheduler.apply(command))
        plan = scheduler.plan()
        launched = executor.launch(plan) if plan.num_rows else None
        done, in_flight = (in_flight, launched) if lookahead else (launched, None)
        if done is not None:
            outbox.send((scheduler.commit(done.plan, done.wait()),))
