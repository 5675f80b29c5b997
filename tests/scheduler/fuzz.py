"""Random scenarios through the real loop: `run_scenario(seed)` raises if anything is wrong.

After every event: the state's invariants, who was admitted and preempted, the order of each request's events, and its
tokens and logprobs against a direct computation. At the end: every request ended exactly once, for a reason that the
scenario explains, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from surefoot.engine.loop import run
from surefoot.protocol.messages import (
    NO_LOGPROBS,
    Abort,
    Accepted,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    RefusalCause,
    Refused,
    Submit,
    TokenBatch,
)
from surefoot.protocol.step_plan import NO_PAGE, StepPlan
from surefoot.scheduler import invariants
from surefoot.scheduler.scheduler import Scheduler

from .fake_device import FakeDevice, Launched, continuation, logprobs_at
from .scenarios import Scenario, make_scenario


@dataclass(eq=False)
class Record:
    """What became of one submitted request."""

    request: GenerateRequest
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0  # output tokens whose logprobs came
    num_scored: int = 1  # prompt tokens that need no logprob any more
    accepted: bool = False
    aborted: bool = False
    admissions: int = 0
    last_admission: int = -1  # serial number
    terminal: list[Refused | Finished] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.prompt_logprobs != NO_LOGPROBS

    @property
    def sequence(self) -> list[int]:
        return [*self.request.prompt_ids, *self.expected]


class Harness:
    """Inbox, outbox and executor of one scenario."""

    def __init__(self, scenario: Scenario, random: Random) -> None:
        self.scenario, self.random = scenario, random
        self.scheduler = Scheduler(scenario.bounds, scenario.prefix_cache)
        self.todo = deque(scenario.requests)
        self.records: list[Record] = []
        self.current: dict[int, Record] = {}  # accepted and not ended, by id
        self.actual_ids: dict[int, int] = {}  # of the scenario's requests, with reuse_ids
        self.live_requests: dict[int, GenerateRequest] = {}
        self.free_id = 1000  # that of the request that ended last, and at first one that nobody has
        self.expected_refusal: RefusalCause | None = None
        self.duplicate_id = -1  # of a submitted duplicate, until its refusal
        self.device = FakeDevice(scenario.bounds, self.live_requests, random, scenario.faults)
        self.turns = 0
        self.admissions = 0
        self.decoding: dict[int, bool] = {}  # by id, of those that run before a plan is made: whether they decode
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
        self.decoding = {request.id: request.tail_on_device for request in self.scheduler.running.values()}

    def submit(self, request: GenerateRequest) -> Submit:
        given_id = request.id
        if self.scenario.reuse_ids and self.free_id not in self.current:
            request = replace(request, id=self.free_id)
        self.actual_ids[given_id] = request.id
        request = replace(request, group_id=self.actual_ids.get(request.group_id, request.group_id))
        self.expected_refusal = self.refusal(request)
        self.records.append(Record(request, [] if self.expected_refusal else continuation(request)))
        return Submit(request)

    def refusal(self, request: GenerateRequest) -> RefusalCause | None:
        bounds, prompt = self.scenario.bounds, request.prompt_ids
        length = len(prompt) + request.max_new_tokens
        if not prompt or min(prompt) < 0 or request.max_new_tokens < 1:
            return RefusalCause.INVALID
        if length > bounds.max_model_len:
            return RefusalCause.TOO_LONG
        if request.sampling.penalises and not bounds.count_rows:
            return RefusalCause.INVALID
        if any(bounds.most_pages(group, length - 1) > group.num_pages for group in bounds.kv_groups):
            return RefusalCause.TOO_LONG
        if len(self.current) >= bounds.max_running_requests + bounds.max_queued_requests:
            return RefusalCause.QUEUE_FULL
        return None

    # Executor

    def launch(self, plan: StepPlan) -> Launched:
        invariants.check(self.scheduler)
        self.check_victims()
        self.check_admissions(plan)
        self.seen["prefill rows"] += len(plan.prefill)
        self.seen["decode rows"] += len(plan.decode_slots)
        self.seen["pages before a window"] += sum(
            run.pages[:1] == (NO_PAGE,) and row.start > 0 for row in plan.prefill for run in row.pages
        )
        return self.device.launch(plan)

    def check_victims(self) -> None:
        """Whoever was preempted was less urgent than those that run on, or as urgent and admitted later."""
        running = {request.id for request in self.scheduler.running.values()}
        stayed = [self.current[request_id] for request_id in self.decoding if request_id in running]
        for request_id, was_decoding in self.decoding.items():
            if request_id in running or request_id not in self.current:
                continue
            victim = self.current[request_id]
            if was_decoding or not any(group.window for group in self.scenario.bounds.kv_groups):
                order = (victim.request.priority, victim.last_admission)
                assert all((other.request.priority, other.last_admission) < order for other in stayed), "wrong victim"
            else:
                self.seen["preempted while prefilling"] += 1

    def check_admissions(self, plan: StepPlan) -> None:
        waiting = [self.current[request.id] for request in self.scheduler.waiting]
        admitted = [self.current[admission.request_id] for admission in plan.admissions]
        for record in admitted:
            assert not self.must_wait(record), f"sibling {record.request.id} is admitted before its prompt is cached"
            for other in waiting:
                if (other.admissions == 0, other.request.priority) < (record.admissions == 0, record.request.priority):
                    has_no_row = other.request.sampling.penalises and not self.scheduler.free_count_rows
                    assert has_no_row or self.must_wait(other), f"{other.request} is passed by by {record.request}"
        for record in admitted:
            self.admissions += 1
            record.admissions += 1
            record.last_admission = self.admissions
            self.seen["penalised"] += record.request.sampling.penalises
        self.seen["waiting siblings"] += sum(self.must_wait(record) for record in waiting)

    def must_wait(self, record: Record) -> bool:
        """Whether it is to share the pages of a prompt that another is to compute first."""
        request = record.request
        first = self.current.get(request.group_id)
        return (
            first is not None
            and first is not record
            and first.request.group_id == first.request.id
            and not first.tokens
            and self.scenario.prefix_cache
            and (not record.wants_prompt_logprobs or record.num_scored == len(request.prompt_ids))
        )

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
        self.receive_logprobs(batch)
        for finished in batch.finished:
            record = self.current.pop(finished.request_id)
            del self.live_requests[finished.request_id]
            record.terminal.append(finished)
            self.free_id = finished.request_id
            self.check_reason(record, finished)
            self.seen[finished.reason] += 1
        stats = batch.stats
        assert stats.running + stats.waiting == len(self.current)
        assert [pages.total for pages in stats.pages] == [group.num_pages for group in self.scenario.bounds.kv_groups]

    def receive_logprobs(self, batch: TokenBatch) -> None:
        asking = [i for i in batch.request_ids if self.current[i].request.logprobs != NO_LOGPROBS]
        assert [logprobs.request_id for logprobs in batch.logprobs] == asking, "logprobs come with their token"
        for logprobs in batch.logprobs:
            record = self.current[logprobs.request_id]
            position = len(record.request.prompt_ids) + record.num_logprobs
            expected = logprobs_at((position,), record.sequence, record.request.id, record.request.logprobs)
            assert logprobs == expected
            record.num_logprobs += 1
        for logprobs in batch.prompt_logprobs:
            record = self.current[logprobs.request_id]
            assert record.wants_prompt_logprobs, "nobody asked for these"
            positions = range(record.num_scored, record.num_scored + len(logprobs.chosen))
            assert positions, "empty logprobs"
            expected = logprobs_at(positions, record.sequence, record.request.id, record.request.prompt_logprobs)
            assert logprobs == expected, "prompt logprobs come once, in order"
            record.num_scored += len(positions)
            self.seen["scored tokens"] += len(positions)
            self.seen["scored after a preemption"] += record.admissions > 1

    def check_reason(self, record: Record, finished: Finished) -> None:
        match finished.reason:
            case FinishReason.STOP:
                self.check_whole(record)
                assert record.tokens[-1] in record.request.stop_ids
            case FinishReason.LENGTH:
                self.check_whole(record)
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

    def check_whole(self, record: Record) -> None:
        assert record.tokens == record.expected
        assert record.num_logprobs == (len(record.tokens) if record.request.logprobs != NO_LOGPROBS else 0)
        assert record.num_scored == (len(record.request.prompt_ids) if record.wants_prompt_logprobs else 1)


def play(scenario: Scenario, random: Random) -> Harness:
    harness = Harness(scenario, random)
    run(harness, harness.scheduler, harness, harness, scenario.lookahead)
    scheduler = harness.scheduler
    assert not harness.current
    assert not scheduler.has_work
    for record in harness.records:
        assert len(record.terminal) == 1, f"request {record.request.id} ended {len(record.terminal)} times"
    assert len(scheduler.free_count_rows) == scenario.bounds.count_rows, "count rows were lost"
    for group, pool in enumerate(scheduler.kv.pools):
        scheduler.kv.cache.evict(group, len(pool.holders))
        assert sorted(pool.free) == list(range(len(pool.holders))), "pages were lost"
    assert not scheduler.kv.cache.root.children, "nodes without pages were left behind"
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
