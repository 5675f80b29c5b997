"""The frontend's end of the engine: requests go out, text comes back, every request ends exactly once.

EngineClientError
 ├─ Overloaded           the engine's queue is full
 ├─ EngineUnavailable    the engine loads, has died, or the server drains
 ├─ RequestRefused       the engine will not run this request
 └─ RequestFailed        the request was accepted and ended without an answer
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, assert_never

from surefoot.frontend.detokenizer import TextStream
from surefoot.protocol.messages import (
    Abort,
    Accepted,
    Command,
    EngineReady,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    RefusalCause,
    Refused,
    Stop,
    Submit,
    TokenBatch,
)


class EngineClientError(Exception):
    """The message is fit for a client."""


class Overloaded(EngineClientError):
    pass


class EngineUnavailable(EngineClientError):
    pass


class RequestRefused(EngineClientError):
    pass


class RequestFailed(EngineClientError):
    pass


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"  # the engine died, another one is on its way
    DEAD = "dead"  # the engine died, no other one comes
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one sequence: all that had arrived when it was asked for, so often of several tokens."""

    index: int  # of the sequence among those submitted together
    text: str  # not empty


@dataclass(frozen=True, slots=True)
class Ended:
    """The last update of one sequence."""

    index: int
    reason: Literal["stop", "length"]
    output_tokens: int  # a stop id counts; what was computed after a stop string does not
    cached_tokens: int  # prompt tokens that came from the prefix cache


Update = Delta | Ended


class CommandSender(Protocol):
    def send(self, messages: Sequence[Command]) -> None: ...


class EventReceiver(Protocol):
    async def receive(self) -> list[Event]: ...


class _Sequence:
    """One request in flight: filled by the receiving task, emptied by the task that serves its client."""

    def __init__(self, index: int, request: GenerateRequest, text: TextStream, generation: _Generation) -> None:
        self.index = index
        self.request_id = request.id
        self.text = text
        self.generation = generation
        self.accepted = False
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.ended = False  # its last update is out


class _Generation:
    """Sequences that are submitted together and served by one task."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.failure: EngineClientError | None = None

    def fail(self, failure: EngineClientError) -> None:
        self.failure = self.failure or failure
        self.news.set()


class EngineClient:
    """Lives in one asyncio loop. `run` must be running for anything to come back."""

    def __init__(self, sender: CommandSender, receiver: EventReceiver) -> None:
        self._sender = sender
        self._receiver = receiver
        self._ids = itertools.count(1)
        self._in_engine: dict[int, _Sequence] = {}  # submitted, and not known to have ended there
        self._generations: set[_Generation] = set()
        self._engine_state = EngineState.LOADING
        self._draining = False
        self._death = ""
        self._left = asyncio.Event()  # a generation has ended, for wait_idle
        self._subscribers: list[Callable[[Event], None]] = []

    @property
    def state(self) -> EngineState:
        return EngineState.DRAINING if self._draining else self._engine_state

    @property
    def state_detail(self) -> str:
        """One sentence for a client that is turned away."""
        match self.state:
            case EngineState.LOADING:
                return "the engine is loading"
            case EngineState.READY:
                return "the engine is ready"
            case EngineState.RESTARTING:
                return f"the engine is restarting: {self._death}"
            case EngineState.DEAD:
                return f"the engine died: {self._death}"
            case EngineState.DRAINING:
                return "the server is shutting down"

    def new_id(self) -> int:
        return next(self._ids)

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """`callback` is given every event of the engine, before those it concerns are."""
        self._subscribers.append(callback)

    @asynccontextmanager
    async def generate(
        self, sequences: Sequence[tuple[GenerateRequest, TextStream]]
    ) -> AsyncIterator[AsyncIterator[Update]]:
        """Submits the sequences and enters when the engine has accepted them all.

        Gives their updates as they come, the last one of each sequence an `Ended`; raises RequestFailed from among
        them if a sequence ends without an answer. Entering raises Overloaded, RequestRefused or EngineUnavailable.
        Leaving early, for any reason, aborts what still runs.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.state_detail)
        generation = _Generation()
        members = [_Sequence(index, *pair, generation) for index, pair in enumerate(sequences)]
        self._generations.add(generation)
        self._in_engine.update((member.request_id, member) for member in members)
        try:
            self._sender.send([Submit(request) for request, _ in sequences])
            await self._accepted(generation, members)
            yield self._updates(generation, members)
        finally:
            self._generations.discard(generation)
            self._abort([member.request_id for member in members])
            self._left.set()

    async def run(self) -> None:
        """Hands events to those they concern, until cancelled."""
        while True:
            for event in await self._receiver.receive():
                self._handle(event)

    def engine_died(self, detail: str, restarting: bool) -> None:
        """Ends every open generation with an error. Until another engine is ready, new ones are turned away."""
        self._death = detail
        self._engine_state = EngineState.RESTARTING if restarting else EngineState.DEAD
        self._in_engine.clear()
        self._fail_all(RequestFailed(f"the engine died while it served this request: {detail}"))

    def begin_drain(self) -> None:
        """New generations are turned away from now on."""
        self._draining = True

    async def wait_idle(self, seconds: float) -> None:
        """Waits until every generation has ended; ends those that have not after `seconds` with an error."""
        try:
            async with asyncio.timeout(seconds):
                await self._all_left()
        except TimeoutError:
            self._fail_all(RequestFailed("the server is shutting down and this request took too long to finish"))
            with suppress(TimeoutError):  # a client that does not read cannot be told
                async with asyncio.timeout(1):
                    await self._all_left()

    async def _all_left(self) -> None:
        while self._generations:
            self._left.clear()
            await self._left.wait()

    def stop_engine(self) -> None:
        """Tells the engine that no more commands will come."""
        self._sender.send([Stop()])

    def _fail_all(self, failure: EngineClientError) -> None:
        for generation in self._generations:
            generation.fail(failure)

    def _abort(self, request_ids: list[int]) -> None:
        """Aborts those that the engine still has. Their last event will concern nobody."""
        running = [request_id for request_id in request_ids if self._in_engine.pop(request_id, None)]
        if running:
            self._sender.send([Abort(request_id) for request_id in running])

    async def _accepted(self, generation: _Generation, members: list[_Sequence]) -> None:
        while not all(member.accepted for member in members):
            await generation.news.wait()
            generation.news.clear()
            match generation.failure:
                case RequestFailed() as failure:  # nothing of it has run: the client may try again
                    raise EngineUnavailable(str(failure))
                case EngineClientError() as failure:
                    raise failure
        generation.news.set()  # tokens may have come along with the last acceptance

    async def _updates(self, generation: _Generation, members: list[_Sequence]) -> AsyncIterator[Update]:
        while not all(member.ended for member in members):
            await generation.news.wait()
            generation.news.clear()
            for member in members:
                if not member.ended:
                    for update in self._advance(member):
                        yield update
            if generation.failure:
                for member in members:
                    if member.text.stopped and not member.ended:  # complete but for the count of cached tokens
                        member.ended = True
                        yield Ended(member.index, "stop", member.text.num_tokens, 0)
                if not all(member.ended for member in members):
                    raise generation.failure

    def _advance(self, member: _Sequence) -> Iterator[Update]:
        """What has happened to a sequence since it was last asked."""
        tokens, member.tokens = member.tokens, []
        finished = member.finished
        stop_id = finished is not None and finished.reason is FinishReason.STOP
        was_stopped = member.text.stopped
        if not was_stopped and (tokens or finished):
            text = member.text.push(tokens, finished is not None, drop_last=stop_id)
            if text:
                yield Delta(member.index, text)
            if member.text.stopped and finished is None:
                self._sender.send([Abort(member.request_id)])
        if finished is None:
            # After a stop string the engine's answer to the abort is awaited: it tells how much was cached.
            return
        if not member.text.stopped and finished.reason in (FinishReason.ERROR, FinishReason.ABORTED):
            raise RequestFailed(finished.detail or "the engine aborted this request")
        member.ended = True
        reason: Literal["stop", "length"] = "stop" if stop_id or member.text.stopped else "length"
        yield Ended(member.index, reason, member.text.num_tokens, finished.cached_tokens)

    def _handle(self, event: Event) -> None:
        for callback in self._subscribers:
            callback(event)
        match event:
            case TokenBatch():
                self._hand_out(event)
            case Accepted(request_id):
                if member := self._in_engine.get(request_id):
                    member.accepted = True
                    member.generation.news.set()
            case Refused(request_id, cause, detail):
                if member := self._in_engine.pop(request_id, None):
                    full = cause is RefusalCause.QUEUE_FULL
                    member.generation.fail(Overloaded(detail) if full else RequestRefused(detail))
            case EngineReady():
                self._engine_state = EngineState.READY
            case _:
                assert_never(event)

    def _hand_out(self, batch: TokenBatch) -> None:
        in_engine = self._in_engine
        for request_id, token in zip(batch.request_ids, batch.token_ids, strict=True):
            if member := in_engine.get(request_id):
                member.tokens.append(token)
                member.generation.news.set()
        for finished in batch.finished:
            if member := in_engine.pop(finished.request_id, None):
                member.finished = finished
                member.generation.news.set()
