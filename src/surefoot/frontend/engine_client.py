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

from surefoot.frontend.output import Output, Score, ScoredToken, scores
from surefoot.protocol.messages import (
    Abort,
    Accepted,
    Command,
    EngineReady,
    Event,
    Finished,
    Logprobs,
    RefusalCause,
    Refused,
    Stop,
    Submit,
    TokenBatch,
)

RETRY_SECONDS = 5  # if nobody can tell how long it will take


class EngineClientError(Exception):
    """The message is fit for a client."""


class Overloaded(EngineClientError):
    pass


class EngineUnavailable(EngineClientError):
    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds  # after which trying again may help


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
class Begun:
    """The first update of one sequence: its prompt is computed."""

    index: int  # of the sequence among those submitted together
    prompt_scores: tuple[Score, ...]  # of the prompt's tokens from the second on, if they were asked for


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one sequence: all that had arrived when it was asked for, so often of several tokens."""

    index: int
    text: str  # not empty
    tokens: tuple[ScoredToken, ...]  # whose text begins in it, if logprobs were asked for


@dataclass(frozen=True, slots=True)
class Ended:
    """The last update of one sequence."""

    index: int
    reason: Literal["stop", "length"]
    output_tokens: int  # a stop id counts; what was computed after a stop string does not
    cached_tokens: int  # prompt tokens that came from the prefix cache
    tokens: tuple[ScoredToken, ...]  # those without text that no Delta had


Update = Begun | Delta | Ended


class CommandSender(Protocol):
    def send(self, messages: Sequence[Command]) -> None: ...


class EventReceiver(Protocol):
    async def receive(self) -> list[Event]: ...


class _Sequence:
    """One request in flight: filled by the receiving task, emptied by the task that serves its client."""

    def __init__(self, index: int, output: Output, generation: _Generation) -> None:
        self.index = index
        self.request_id = output.request.id
        self.output = output
        self.generation = generation
        self.accepted = False
        self.prompt_logprobs: list[Logprobs] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []  # of `tokens`
        self.finished: Finished | None = None
        self.unsent: tuple[ScoredToken, ...] = ()  # for its last update
        self.begun = False  # its first update is out
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

    def __init__(self, sender: CommandSender, receiver: EventReceiver, first_request_id: int = 1) -> None:
        self._sender = sender
        self._receiver = receiver
        self._ids = itertools.count(first_request_id)
        self._in_engine: dict[int, _Sequence] = {}  # submitted, and not known to have ended there
        self._generations: set[_Generation] = set()
        self._engine_state = EngineState.LOADING
        self._draining = False
        self._death = ""
        self.retry_seconds = RETRY_SECONDS  # for a client that is turned away
        self._left = asyncio.Event()  # a generation has ended, for wait_idle
        self._subscribers: list[Callable[[Event], None]] = []

    @property
    def state(self) -> EngineState:
        is_draining = self._draining and self._engine_state is not EngineState.DEAD
        return EngineState.DRAINING if is_draining else self._engine_state

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
    async def generate(self, outputs: Sequence[Output]) -> AsyncIterator[AsyncIterator[Update]]:
        """Submits the outputs' requests and enters when the engine has accepted them all.

        Gives their updates as they come, the last one of each sequence an `Ended`; raises RequestFailed from among
        them if a sequence ends without an answer. Entering raises Overloaded, RequestRefused or EngineUnavailable.
        Leaving early, for any reason, aborts what still runs.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.state_detail, self.retry_seconds)
        generation = _Generation()
        members = [_Sequence(index, output, generation) for index, output in enumerate(outputs)]
        self._generations.add(generation)
        self._in_engine.update((member.request_id, member) for member in members)
        try:
            self._sender.send([Submit(output.request) for output in outputs])
            await self._accepted(generation, members)
            yield self._updates(generation, members)
        finally:
            self._generations.discard(generation)
            self._abort([member.request_id for member in members])
            self._left.set()

    def connect(self, sender: CommandSender, receiver: EventReceiver) -> None:
        """Speaks to another engine from now on. `run` must be cancelled before, and started anew."""
        self._sender = sender
        self._receiver = receiver

    async def run(self) -> None:
        """Hands events to those they concern, until cancelled."""
        while True:
            for event in await self._receiver.receive():
                self._handle(event)

    def engine_died(self, detail: str, restarting: bool, retry_seconds: int = RETRY_SECONDS) -> None:
        """Ends every open generation with an error. Until another engine is ready, new ones are turned away.

        No event of the dead engine may be handed out afterwards: `run` must have been cancelled.
        """
        self._death = detail
        self.retry_seconds = retry_seconds
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
                    raise EngineUnavailable(str(failure), self.retry_seconds)
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
                    if member.output.stopped and not member.ended:  # complete but for the count of cached tokens
                        member.ended = True
                        yield Ended(member.index, "stop", len(member.output.token_ids), 0, member.unsent)
                if not all(member.ended for member in members):
                    raise generation.failure

    def _advance(self, member: _Sequence) -> Iterator[Update]:
        """What has happened to a sequence since it was last asked."""
        output, finished, was_stopped = member.output, member.finished, member.output.stopped
        tokens, logprobs, member.tokens, member.logprobs = member.tokens, member.logprobs, [], []
        if tokens and not member.begun:
            member.begun = True
            yield Begun(member.index, tuple(scores(member.prompt_logprobs)))
        piece = output.push(tokens, logprobs, finished)
        if piece.text:
            yield Delta(member.index, piece.text, piece.tokens)
        else:
            member.unsent += piece.tokens
        if finished is None:
            if output.stopped and not was_stopped:
                # The engine's answer to the abort is awaited: it tells how much was cached.
                self._sender.send([Abort(member.request_id)])
            return
        if not output.is_complete(finished):
            raise RequestFailed(finished.detail or "the engine aborted this request")
        member.ended = True
        reason, count = output.finish_reason(finished), len(output.token_ids)
        yield Ended(member.index, reason, count, finished.cached_tokens, member.unsent)

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
                self.retry_seconds = RETRY_SECONDS
            case _:
                assert_never(event)

    def _hand_out(self, batch: TokenBatch) -> None:
        in_engine = self._in_engine
        for request_id, token in zip(batch.request_ids, batch.token_ids, strict=True):
            if member := in_engine.get(request_id):
                member.tokens.append(token)
                member.generation.news.set()
        for part in batch.logprobs:
            if member := in_engine.get(part.request_id):
                member.logprobs.append(part)
        for part in batch.prompt_logprobs:
            if member := in_engine.get(part.request_id):
                member.prompt_logprobs.append(part)
        for finished in batch.finished:
            if member := in_engine.pop(finished.request_id, None):
                member.finished = finished
                member.generation.news.set()
