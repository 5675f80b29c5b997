"""An engine without a model: it speaks the messages of the protocol and writes what it is told to write."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from surefoot.protocol.messages import (
    NO_LOGPROBS,
    Abort,
    Accepted,
    Command,
    EngineReady,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Logprobs,
    PageStats,
    RefusalCause,
    Refused,
    Stop,
    Submit,
    TokenBatch,
)

CACHED_TOKENS = 2  # of every prompt, as this engine tells it
PATH = "decode/none/torch/dense/plain"
Script = Callable[[GenerateRequest], Sequence[int]]


def told_logprob(token: int, rank: int = 0) -> float:
    """What this engine says of a token: the less, the higher its rank among the most probable ones."""
    return -(token % 7) / 4 - rank - 0.125


def told_logprobs(request_id: int, tokens: Sequence[int], most: int) -> Logprobs:
    """The most probable ids are the token itself and those after it."""
    top_ids = tuple(tuple((token + rank) % 301 for rank in range(most)) for token in tokens)
    return Logprobs(
        request_id,
        tuple(told_logprob(token) for token in tokens),
        top_ids,
        tuple(tuple(told_logprob(token, rank) for rank in range(most)) for token in tokens),
    )


class Running:
    def __init__(self, request: GenerateRequest, script: Sequence[int]) -> None:
        self.request = request
        self.script = deque(script)
        self.count = 0  # tokens sent
        self.prompt_told = 1  # tokens of the prompt whose logprobs were sent; the first one has none


class FakeEngine:
    """Both ends of the channels of an EngineClient. One `step` gives each running request its next scripted token.

    Logprobs of a prompt come in two halves, the second one with the first token.

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
        self._running: dict[int, Running] = {}
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
                        self._events.put_nowait([TokenBatch((), (), (finished,), (), (), "", self.stats())])
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
        ids, tokens, finished, logprobs, prompt_logprobs = [], [], [], [], []
        for request_id, running in list(self._running.items()):
            request = running.request
            if not running.script:
                finished.append(Finished(request_id, FinishReason.ERROR, 0, "row 3 gave no finite logits"))
                del self._running[request_id]
                continue
            if request.prompt_logprobs != NO_LOGPROBS and running.prompt_told < len(request.prompt_ids):
                start = running.prompt_told
                running.prompt_told = len(request.prompt_ids) // 2 + 1 if start == 1 else len(request.prompt_ids)
                part = request.prompt_ids[start : running.prompt_told]
                prompt_logprobs.append(told_logprobs(request_id, part, request.prompt_logprobs))
                if running.prompt_told < len(request.prompt_ids):
                    continue
            token = running.script.popleft()
            ids.append(request_id)
            tokens.append(token)
            if request.logprobs != NO_LOGPROBS:
                logprobs.append(told_logprobs(request_id, (token,), request.logprobs))
            running.count += 1
            stop_id = token in request.stop_ids
            if stop_id or running.count == request.max_new_tokens:
                reason = FinishReason.STOP if stop_id else FinishReason.LENGTH
                finished.append(Finished(request_id, reason, CACHED_TOKENS, ""))
                del self._running[request_id]
        self.tokens_sent += len(tokens)
        columns = (tuple(column) for column in (ids, tokens, finished, logprobs, prompt_logprobs))
        return TokenBatch(*columns, PATH, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, (PageStats(100, 60, 30), PageStats(10, 8, 0)), 5, 30, 120)

    def _submit(self, request: GenerateRequest) -> None:
        self.submitted.append(request)
        if len(self._running) >= self.places:
            detail = f"{len(self._running)} requests wait already"
            self._events.put_nowait([Refused(request.id, RefusalCause.QUEUE_FULL, detail)])
        else:
            self._running[request.id] = Running(request, self.script(request))
            self._events.put_nowait([Accepted(request.id)])
