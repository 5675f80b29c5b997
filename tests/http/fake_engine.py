"""An engine without a model: it speaks the messages of the protocol and writes what it is told to write."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from surefoot.protocol.messages import (
    Abort,
    Accepted,
    Command,
    EngineReady,
    EngineStats,
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

CACHED_TOKENS = 2  # of every prompt, as this engine tells it
PATH = "decode/none/torch/dense/plain"
Script = Callable[[GenerateRequest], Sequence[int]]


class FakeEngine:
    """Both ends of the channels of an EngineClient. One `step` gives each running request its next scripted token.

    A request ends at a stop id, at max_new_tokens, or with an error at the end of its script.
    """

    def __init__(self, script: Script, places: int = 8) -> None:
        self.script = script
        self.places = places
        self.runs = asyncio.Event()  # cleared: requests are accepted and get no tokens
        self.runs.set()
        self.hears = True  # False: commands are lost
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.stopped = False
        self.tokens_sent = 0
        self._running: dict[int, tuple[GenerateRequest, deque[int], int]] = {}
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()

    def ready(self) -> None:
        self._events.put_nowait([EngineReady(1.5, self.stats())])

    def die(self) -> None:
        """Forgets everything, as the process that is started next does."""
        self._running.clear()
        self._events = asyncio.Queue()

    @property
    def is_idle(self) -> bool:
        return not self._running

    def send(self, messages: Sequence[Command]) -> None:
        assert not self.stopped
        for message in messages if self.hears else ():
            match message:
                case Submit(request):
                    self._submit(request)
                case Abort(request_id):
                    self.aborted.append(request_id)
                    if self._running.pop(request_id, None):
                        finished = Finished(request_id, FinishReason.ABORTED, CACHED_TOKENS, "")
                        self._events.put_nowait([TokenBatch((), (), (finished,), "", self.stats())])
                case Stop():
                    self.stopped = True

    async def receive(self) -> list[Event]:
        while self._events.empty() and not (self._running and self.runs.is_set()):
            await asyncio.sleep(0.001)
        if not self._events.empty():
            return self._events.get_nowait()
        await asyncio.sleep(0.001)
        return [self.step()]

    def step(self) -> TokenBatch:
        ids, tokens, finished = [], [], []
        for request_id, (request, script, count) in list(self._running.items()):
            if not script:
                finished.append(Finished(request_id, FinishReason.ERROR, 0, "row 3 gave no finite logits"))
                del self._running[request_id]
                continue
            token = script.popleft()
            ids.append(request_id)
            tokens.append(token)
            self._running[request_id] = (request, script, count + 1)
            stop_id = token in request.stop_ids
            if stop_id or count + 1 == request.max_new_tokens:
                reason = FinishReason.STOP if stop_id else FinishReason.LENGTH
                finished.append(Finished(request_id, reason, CACHED_TOKENS, ""))
                del self._running[request_id]
        self.tokens_sent += len(tokens)
        return TokenBatch(tuple(ids), tuple(tokens), tuple(finished), PATH, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 100, 60, 30, 5, 0, 0)

    def _submit(self, request: GenerateRequest) -> None:
        self.submitted.append(request)
        if len(self._running) >= self.places:
            detail = f"{len(self._running)} requests wait already"
            self._events.put_nowait([Refused(request.id, RefusalCause.QUEUE_FULL, detail)])
        else:
            self._running[request.id] = (request, deque(self.script(request)), 0)
            self._events.put_nowait([Accepted(request.id)])
