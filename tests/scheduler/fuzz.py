"""Random scenarios through the real loop: `run_scenario(seed)` raises if anything is wrong.

After every event: the state's invariants, the order of each request's events, and its tokens against a direct
computation. At the end: every request ended exactly once, for a reason that the scenario explains, and no page is lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from surefoot.config.bounds import Bounds
from surefoot.engine.loop import run
from surefoot.protocol.messages import (
    Abort,
    Accepted,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    RefusalCause,
    Refused,
    Sampling,
    Submit,
    TokenBatch,
)
from surefoot.protocol.step_plan import StepPlan
from surefoot.scheduler import invariants
from surefoot.scheduler.scheduler import Scheduler

from .fake_device import VOCAB, FakeDevice, Faults, Launched, continuation


@dataclass(frozen=True)
class Scenario:
    bounds: Bounds
    prefix_cache: bool
    lookahead: int
    requests: tuple[GenerateRequest, ...]
    arrival: float  # how probable it is that another request comes before a step
    abort: float  # that a live one is aborted before a step
    reuse_ids: bool
    faults: Faults


def make_scenario(random: Random) -> Scenario:
    page_size = random.randint(1, 8)
    max_model_len = random.randint(8, 48)
    bounds = Bounds(
        page_size=page_size,
        num_pages=-(-max_model_len // page_size) + random.choice((0, 0, 1, 3, 8, 40)),
        max_model_len=max_model_len,
        max_running_requests=random.randint(1, 7),
        max_queued_requests=random.choice((0, 1, 4, 100)),
        chunked_prefill_size=random.choice((1, 2, 3, 7, 16, 64)),
    )
    if random.random() < 0.1:  # the longest request does not fit the pool
        bounds = replace(bounds, num_pages=max(1, bounds.num_pages - random.randint(1, 3)))
    stems = [random.choices(range(VOCAB), k=random.randint(1, max_model_len - 2)) for _ in range(3)]
    namespaces = random.choice((("",), ("", "a"), ("a", "b", "")))
    requests = tuple(make_request(random, i, stems, namespaces, bounds) for i in range(random.randint(4, 20)))
    calm = random.random() < 0.5
    return Scenario(
        bounds=bounds,
        prefix_cache=random.random() < 0.8,
        lookahead=random.randint(0, 1),
        requests=requests,
        arrival=random.choice((0.1, 0.8, 0.95)),
        abort=random.choice((0, 0.02, 0.15)),
        reuse_ids=random.random() < 0.3,
        faults=Faults() if calm else Faults(random.choice((0, 0.02, 0.1)), random.choice((0, 0.01, 0.05))),
    )


def make_request(
    random: Random, request_id: int, stems: Sequence[Sequence[int]], namespaces: Sequence[str], bounds: Bounds
) -> GenerateRequest:
    """Now and then one that must be refused."""
    stem = random.choice(stems)
    tail = random.choices(range(VOCAB), k=random.randint(0, 5))
    prompt = (*stem[: random.randint(1, len(stem))], *tail)[: bounds.max_model_len - 1]
    max_new = random.randint(1, bounds.max_model_len - len(prompt))
    if random.random() < 0.05:
        prompt, max_new = random.choice((((), 1), (prompt, 0), (prompt, bounds.max_model_len), ((-1,), 1)))
    return GenerateRequest(
        id=request_id,
        prompt_ids=prompt,
        max_new_tokens=max_new,
        min_new_tokens=random.randint(0, max_new) if random.random() < 0.3 else 0,
        stop_ids=tuple(random.sample(range(VOCAB), k=random.choice((0, 0, 1, 3)))),
        sampling=Sampling(0, 0, 1, 0, seed=random.randint(0, 3)),
        cache_namespace=random.choice(namespaces),
    )


@dataclass(eq=False)
class Record:
    """What became of one submitted request."""

    request: GenerateRequest
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: bool = False
    aborted: bool = False
    terminal: list[Refused | Finished] = field(default_factory=list)


class Harness:
    """Inbox, outbox and executor of one scenario."""

    def __init__(self, scenario: Scenario, random: Random) -> None:
        self.scenario, self.random = scenario, random
        self.scheduler = Scheduler(scenario.bounds, scenario.prefix_cache)
        self.todo = deque(scenario.requests)
        self.records: list[Record] = []
        self.current: dict[int, Record] = {}  # accepted and not ended, by id
        self.live_requests: dict[int, GenerateRequest] = {}
        self.free_id = 1000  # that of the request that ended last, and at first one that nobody has
        self.expected_refusal: RefusalCause | None = None
        self.duplicate_id = -1  # of a submitted duplicate, until its refusal
        self.device = FakeDevice(scenario.bounds, self.live_requests, random, scenario.faults)
        self.turns = 0
        self.seen: Counter[str] = Counter()

    # Inbox

    @property
    def is_open(self) -> bool:
        return bool(self.todo)

    def drain(self, block: bool) -> Iterable[Submit | Abort]:
        """A generator: the loop applies each command before the next is made."""
        self.turns += 1
        assert self.turns < 5000, "no progress"
        while self.todo and (block or self.random.random() < self.scenario.arrival):
            block = False
            yield self.submit(self.todo.popleft())
        if self.current and self.random.random() < self.scenario.abort:
            request_id = self.random.choice(list(self.current))
            self.current[request_id].aborted = True
            yield Abort(request_id)
            assert request_id not in self.current, "an abort ends a request at once"
            yield Abort(request_id)  # the second one is ignored, as is one of an id that never was
            yield Abort(10**6)
        if self.current and self.random.random() < 0.02:
            self.duplicate_id = self.random.choice(list(self.current))
            yield Submit(self.current[self.duplicate_id].request)
            assert self.duplicate_id == -1, "a duplicate id is refused"

    def submit(self, request: GenerateRequest) -> Submit:
        if self.scenario.reuse_ids and self.free_id not in self.current:
            request = replace(request, id=self.free_id)
        self.expected_refusal = self.refusal(request)
        self.records.append(Record(request, [] if self.expected_refusal else continuation(request)))
        return Submit(request)

    def refusal(self, request: GenerateRequest) -> RefusalCause | None:
        bounds, prompt = self.scenario.bounds, request.prompt_ids
        length = len(prompt) + request.max_new_tokens
        if not prompt or min(prompt) < 0 or request.max_new_tokens < 1:
            return RefusalCause.INVALID
        if length > bounds.max_model_len or length - 1 > bounds.kv_tokens:
            return RefusalCause.TOO_LONG
        if len(self.current) >= bounds.max_running_requests + bounds.max_queued_requests:
            return RefusalCause.QUEUE_FULL
        return None

    # Executor

    def launch(self, plan: StepPlan) -> Launched:
        invariants.check(self.scheduler)
        self.seen["prefill rows"] += len(plan.prefill)
        self.seen["decode rows"] += len(plan.decode_slots)
        return self.device.launch(plan)

    # Outbox

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Accepted():
                    self.accept(self.records[-1], event)
                case Refused() if event.request_id == self.duplicate_id:
                    assert event.cause == RefusalCause.INVALID
                    self.duplicate_id = -1
                case Refused():
                    assert event.cause == self.expected_refusal, event
                    assert event.detail
                    self.records[-1].terminal.append(event)
                    self.seen["refused " + event.cause] += 1
                case TokenBatch():
                    self.receive(event)
                case _:
                    raise AssertionError(event)
        invariants.check(self.scheduler)

    def accept(self, record: Record, event: Accepted) -> None:
        assert self.expected_refusal is None
        assert record.request.id == event.request_id
        assert event.request_id not in self.current
        record.accepted = True
        self.current[event.request_id] = record
        self.live_requests[event.request_id] = record.request

    def receive(self, batch: TokenBatch) -> None:
        in_flight = [request for step in self.scheduler.in_flight for request in step.sampling]
        self.seen["stray rows"] += sum(request.ended for request in in_flight)
        assert len(set(batch.request_ids)) == len(batch.request_ids) == len(batch.token_ids)
        for request_id, token in zip(batch.request_ids, batch.token_ids, strict=True):
            record = self.current[request_id]
            record.tokens.append(token)
            assert record.tokens == record.expected[: len(record.tokens)], "a token differs from the direct computation"
        for finished in batch.finished:
            record = self.current.pop(finished.request_id)
            del self.live_requests[finished.request_id]
            record.terminal.append(finished)
            self.free_id = finished.request_id
            self.check_reason(record, finished)
            self.seen[finished.reason] += 1
        stats = batch.stats
        assert stats.running + stats.waiting == len(self.current)
        assert stats.pages_total == self.scenario.bounds.num_pages

    def check_reason(self, record: Record, finished: Finished) -> None:
        match finished.reason:
            case FinishReason.STOP:
                assert record.tokens == record.expected
                assert record.tokens[-1] in record.request.stop_ids
            case FinishReason.LENGTH:
                assert record.tokens == record.expected
                assert len(record.tokens) == record.request.max_new_tokens
            case FinishReason.ABORTED:
                assert record.aborted
            case FinishReason.ERROR if finished.detail == "non-finite logits":
                assert record.request.id in self.device.non_finite
            case FinishReason.ERROR:
                assert finished.detail == "RuntimeError: injected"
                assert record.request.id in self.device.failed_requests
        assert 0 <= finished.cached_tokens < len(record.request.prompt_ids)
        assert finished.cached_tokens % self.scenario.bounds.page_size == 0
        assert self.scenario.prefix_cache or finished.cached_tokens == 0
        self.seen["cached tokens"] += finished.cached_tokens


def play(scenario: Scenario, random: Random) -> Harness:
    harness = Harness(scenario, random)
    run(harness, harness.scheduler, harness, harness, scenario.lookahead)
    scheduler, pool = harness.scheduler, harness.scheduler.pool
    assert not harness.current
    assert not scheduler.has_work
    for record in harness.records:
        assert len(record.terminal) == 1, f"request {record.request.id} ended {len(record.terminal)} times"
    scheduler.cache.evict(scheduler.cache.num_pages)
    assert sorted(pool.free) == list(range(scenario.bounds.num_pages)), "pages were lost"
    harness.seen["scenarios"] += 1
    harness.seen["preemptions"] += scheduler.preemptions
    return harness


def run_scenario(seed: int) -> Harness:
    random = Random(seed)
    return play(make_scenario(random), random)


def run_scenarios(seeds: range) -> Counter[str]:
    """What happened in all of them. The message of a failure names the seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += run_scenario(seed).seen
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return seen
