"""A scheduler on a fake device, driven step by step."""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import replace

from surefoot.config.bounds import Bounds, KVGroup
from surefoot.protocol.messages import (
    GREEDY,
    NO_LOGPROBS,
    Abort,
    Event,
    Finished,
    GenerateRequest,
    Logprobs,
    Submit,
    TokenBatch,
)
from surefoot.protocol.step_plan import StepFailed, StepPlan
from surefoot.scheduler import invariants
from surefoot.scheduler.scheduler import Scheduler

from .fake_device import FakeDevice, Launched

BOUNDS = Bounds(
    page_size=4,
    kv_groups=(KVGroup(window=0, num_pages=64),),
    max_model_len=64,
    max_running_requests=4,
    max_queued_requests=100,
    chunked_prefill_size=64,
    count_rows=2,
    logits_rows=4,
)
PENALISED = replace(GREEDY, frequency_penalty=0.5)


def make_request(request_id: int, prompt: tuple[int, ...], new: int = 4, **changes: Any) -> GenerateRequest:
    """changes: of other fields of GenerateRequest."""
    request = GenerateRequest(
        id=request_id,
        group_id=request_id,
        prompt_ids=prompt,
        max_new_tokens=new,
        min_new_tokens=0,
        stop_ids=(),
        sampling=GREEDY,
        logprobs=NO_LOGPROBS,
        prompt_logprobs=NO_LOGPROBS,
        cache_namespace="",
        priority=0,
    )
    return replace(request, **changes)


class Rig:
    def __init__(self, bounds: Bounds = BOUNDS, prefix_cache: bool = True) -> None:
        self.scheduler = Scheduler(bounds, prefix_cache)
        self.requests: dict[int, GenerateRequest] = {}
        self.device = FakeDevice(bounds, self.requests)
        self.in_flight: deque[Launched] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.logprobs: dict[int, list[Logprobs]] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}

    def submit(self, request: GenerateRequest) -> Event:
        self.requests[request.id] = request
        (event,) = self.scheduler.apply(Submit(request))
        return event

    def add(self, request_id: int, prompt: tuple[int, ...], new: int = 4, **changes: Any) -> Event:
        return self.submit(make_request(request_id, prompt, new, **changes))

    def abort(self, request_id: int) -> tuple[Event, ...]:
        events = self.scheduler.apply(Abort(request_id))
        for event in events:
            self._receive(event)
        return events

    def plan(self) -> StepPlan:
        """Plans a step and launches it."""
        plan = self.scheduler.plan()
        if plan.num_rows:
            self.in_flight.append(self.device.launch(plan))
        invariants.check(self.scheduler)
        return plan

    def commit(self, error: str = "") -> TokenBatch:
        """Commits the oldest step in flight; with `error`, it has failed."""
        launched = self.in_flight.popleft()
        if error:
            self.device.queue.popleft()
            self.device.fail(launched)
            batch = self.scheduler.commit(launched.plan, StepFailed(launched.plan.step_id, error))
        else:
            batch = self.scheduler.commit(launched.plan, launched.wait())
        self._receive(batch)
        return batch

    def step(self) -> StepPlan:
        plan = self.plan()
        if plan.num_rows:
            self.commit()
        return plan

    def run(self, lookahead: int = 0) -> None:
        """Until every request has ended."""
        while self.scheduler.has_work or self.in_flight:
            plan = self.plan()
            if len(self.in_flight) > (lookahead if plan.num_rows else 0):
                self.commit()

    def running(self) -> list[int]:
        return [request.id for request in self.scheduler.running.values()]

    def waiting(self) -> list[int]:
        return [request.id for request in self.scheduler.waiting]

    def _receive(self, event: Event) -> None:
        assert isinstance(event, TokenBatch)
        for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
            self.tokens.setdefault(request_id, []).append(token)
        for logprobs in event.logprobs:
            self.logprobs.setdefault(logprobs.request_id, []).append(logprobs)
        for logprobs in event.prompt_logprobs:
            self.prompt_logprobs.setdefault(logprobs.request_id, []).append(logprobs)
        self.finished |= {finished.request_id: finished for finished in event.finished}
        invariants.check(self.scheduler)


def bounds(num_pages: int = 64, windows: tuple[int, ...] = (0,), **changes: int) -> Bounds:
    """windows: of each KV group; all have `num_pages`."""
    return replace(BOUNDS, kv_groups=tuple(KVGroup(window, num_pages) for window in windows), **changes)
