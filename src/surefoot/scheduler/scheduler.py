"""Who runs next: commands and results in, step plans and events out.

    apply(command)        a request is queued, refused or aborted
    plan()                every decode row, then prefill chunks: of running requests, then of newly admitted ones
    commit(plan, result)  the only place where results become state

A deterministic function of its calls. `plan` may be called once more before the last step's `commit` (lookahead 1):
it never needs a token's value, and `commit` goes by the request object that a row was planned for, not by its id.

Pages are held before a row enters a step. A request gets all pages for its known tokens when it is admitted, so only
decode rows that cross a page edge need more; if none is left, the most recently admitted request is preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import assert_never

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import (
    Abort,
    Accepted,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    RefusalCause,
    Refused,
    Submit,
    TokenBatch,
)
from surefoot.protocol.step_plan import Admission, PrefillRow, StepDone, StepFailed, StepPlan
from surefoot.scheduler.page_pool import PagePool
from surefoot.scheduler.prefix_cache import PrefixCache
from surefoot.scheduler.request import Request, why_impossible

ADMISSION_WINDOW = 64  # waiting requests among which the one with most cached pages is admitted first
MAX_OVERTAKES = 32  # requests that may be admitted before one that waited longer


class Step:
    """A step between `plan` and `commit`: what goes into the plan, and the request behind every row."""

    __slots__ = ("admissions", "decode_starts", "decoding", "page_appends", "prefill", "prefilling", "step_id")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.admissions: list[Admission] = []
        self.page_appends: list[tuple[int, int, int]] = []
        self.decode_starts: list[int] = []
        self.decoding: list[Request] = []  # one per decode row
        self.prefill: list[PrefillRow] = []
        self.prefilling: list[Request] = []  # one per prefill row

    def freeze(self) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            admissions=tuple(self.admissions),
            page_appends=tuple(self.page_appends),
            decode_slots=tuple([request.slot for request in self.decoding]),
            decode_starts=tuple(self.decode_starts),
            prefill=tuple(self.prefill),
        )

    @property
    def sampling(self) -> list[Request]:
        """The requests of the rows that sample, in row order."""
        last_chunks = [request for request, row in zip(self.prefilling, self.prefill, strict=True) if row.samples]
        return self.decoding + last_chunks


class Scheduler:
    def __init__(self, bounds: Bounds, prefix_cache: bool) -> None:
        self.bounds = bounds
        self.prefix_cache = prefix_cache
        self.pool = PagePool(bounds.num_pages)
        self.cache = PrefixCache(self.pool)
        self.free_slots = list(range(bounds.max_running_requests - 1, -1, -1))
        self.live: dict[int, Request] = {}  # by id: waiting or running
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # by id; preempted ones in front
        self.running: dict[int, Request] = {}  # by slot, in order of admission
        self.in_flight: deque[Step] = deque()
        self.steps_planned = 0
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is alive."""
        return bool(self.live)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=self.bounds.num_pages,
            pages_free=len(self.pool.free),
            pages_cached=self.cache.num_pages,
            preemptions=self.preemptions,
            prefix_hit_tokens=self.prefix_hit_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
        )

    # Commands

    def apply(self, command: Submit | Abort) -> tuple[Event, ...]:
        match command:
            case Submit(asked):
                return (self._submit(asked),)
            case Abort(request_id):
                request = self.live.get(request_id)
                return () if request is None else (self._abort(request),)
            case _:
                assert_never(command)

    def _submit(self, asked: GenerateRequest) -> Accepted | Refused:
        refusal = self._refusal(asked)
        if refusal is not None:
            return refusal
        request = Request(asked)
        self.live[request.id] = self.waiting[request.id] = request
        return Accepted(request.id)

    def _refusal(self, asked: GenerateRequest) -> Refused | None:
        slots, places = self.bounds.max_running_requests, self.bounds.max_queued_requests
        if asked.id in self.live:
            wrong = f"request id {asked.id} is in use: wait until that request has ended"
            return Refused(asked.id, RefusalCause.INVALID, wrong)
        impossible = why_impossible(asked, self.bounds)
        if impossible is not None:
            return impossible
        # Every request passes through the queue, so a free slot is a place there too; and a preempted request keeps
        # the place that it had in a slot.
        if len(self.live) >= slots + places:
            wrong = f"all {slots} running and {places} waiting places are taken: try again later"
            return Refused(asked.id, RefusalCause.QUEUE_FULL, wrong)
        return None

    def _abort(self, request: Request) -> TokenBatch:
        self._keep_prefix(request)
        finished = self._end(request, FinishReason.ABORTED)
        return TokenBatch((), (), (finished,), "", self.stats())

    # Planning

    def plan(self) -> StepPlan:
        """The next step; without rows if there is nothing to do before a commit. A plan with rows must be committed.

        Steps are committed in the order in which they were planned.
        """
        step = Step(self.steps_planned)
        preemptions = self.preemptions
        self._add_decode_rows(step)
        budget = self._add_prefill_rows(step, self.bounds.chunked_prefill_size)
        # After a preemption, pages are short: an admission would take those that it has just made free.
        if self.preemptions == preemptions:
            self._admit(step, budget)
        if step.decoding or step.prefill:
            self.steps_planned += 1
            self.in_flight.append(step)
        return step.freeze()

    def _add_decode_rows(self, step: Step) -> None:
        page_size = self.bounds.page_size
        decoding, starts = step.decoding, step.decode_starts
        for request in list(self.running.values()):
            start = request.num_planned
            if not request.tail_on_device or start == request.end - 1:
                continue  # still prefilling, preempted a moment ago, or nothing left but to commit
            if start == len(request.pages) * page_size:
                if not self._make_room(request):
                    continue
                page = self.pool.allocate(1)[0]
                step.page_appends.append((request.slot, len(request.pages), page))
                request.pages.append(page)
            request.num_planned = start + 1
            request.rows_in_flight += 1
            decoding.append(request)
            starts.append(start)

    def _make_room(self, request: Request) -> bool:
        """Makes a page free, by preemption if need be; False if `request` itself was preempted for it.

        Victims have no row in the step that is being planned: decode rows are planned in order of admission and
        before all others, the victim is the last admitted, so at the latest it is `request`.
        """
        while not self._reserve(1):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue. Tokens are kept, also one that a row in flight will bring."""
        self._keep_prefix(request)
        self._vacate(request)
        request.preempted = True
        self.preemptions += 1
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)

    def _add_prefill_rows(self, step: Step, budget: int) -> int:
        """The next chunks of running requests. Returns what is left of `budget` tokens."""
        for request in self.running.values():
            if budget == 0:
                break
            if not request.tail_on_device:
                budget -= self._add_chunk(step, request, budget, pages=())
        return budget

    def _add_chunk(self, step: Step, request: Request, budget: int, pages: tuple[int, ...]) -> int:
        """At most `budget` of the request's tokens that are not computed yet. Returns how many."""
        start = request.num_planned
        chunk = tuple(request.tokens[start : start + budget])
        request.num_planned = start + len(chunk)
        request.tail_on_device = request.num_planned == len(request.tokens)
        request.rows_in_flight += 1
        row = PrefillRow(
            request_id=request.id,
            slot=request.slot,
            start=start,
            token_ids=chunk,
            first_page=0,  # all pages come with the first chunk
            pages=pages,
            samples=request.tail_on_device,
        )
        step.prefill.append(row)
        step.prefilling.append(request)
        return len(chunk)

    def _admit(self, step: Step, budget: int) -> None:
        while budget and self.waiting and self.free_slots:
            request = self._choose()
            # A preempted request waits for its rows in flight: they bring a token that it must be recomputed with.
            # And if the chosen one does not fit, nobody smaller passes by: it would wait for ever.
            if request.rows_in_flight or not self._seat(request):
                return
            asked = request.asked
            min_tokens = len(asked.prompt_ids) + asked.min_new_tokens
            step.admissions.append(Admission(request.slot, request.id, asked.sampling, asked.stop_ids, min_tokens))
            budget -= self._add_chunk(step, request, budget, pages=tuple(request.pages))

    def _choose(self) -> Request:
        """The request to admit next: the one with most cached pages, the older one of equals. Nobody starves.

        No request has been overtaken more often than the one in front, since who passes it by passes by all behind.
        """
        front = next(iter(self.waiting.values()))
        if front.preempted or front.overtaken >= MAX_OVERTAKES:
            return front
        return max(islice(self.waiting.values(), ADMISSION_WINDOW), key=self._count_cached_pages)

    def _count_cached_pages(self, request: Request) -> int:
        if request.cached_pages_version != self.cache.version:
            request.cached_pages_version = self.cache.version
            request.cached_pages = self.cache.count(self._matchable_keys(request))
        return request.cached_pages

    def _seat(self, request: Request) -> bool:
        """Gives a waiting request a slot and pages for all its known tokens; False if there are not enough pages.

        With pages for one chunk only, it could be preempted by those that decode before it has sampled anything,
        again and again. When nobody runs, every request that was accepted fits.
        """
        matched = self.cache.match(self._matchable_keys(request))
        missing = self._pages_for(len(request.tokens)) - len(matched)
        if not self._reserve(missing):
            self._release(request, matched)
            if not self.running:
                raise RuntimeError(f"request {request.id} needs {missing} pages more and nobody runs: pages were lost")
            return False
        for other in self.waiting.values():
            if other is request:
                break
            other.overtaken += 1
        del self.waiting[request.id]
        request.slot = self.free_slots.pop()
        request.pages = matched + self.pool.allocate(missing)
        request.num_computed = request.num_planned = len(matched) * self.bounds.page_size
        self.running[request.slot] = request
        if not request.preempted:
            request.cached_tokens = request.num_computed
            self.prefix_hit_tokens += request.num_computed
            self.prefix_query_tokens += len(request.tokens)
        return True

    # Results

    def commit(self, plan: StepPlan, result: StepDone | StepFailed) -> TokenBatch:
        """Makes the result of the oldest step in flight part of the state. Rows of requests that ended are ignored."""
        if not self.in_flight or not plan.step_id == result.step_id == self.in_flight[0].step_id:
            expected = [step.step_id for step in self.in_flight]
            raise ValueError(f"result {result.step_id} of step {plan.step_id} committed; in flight are {expected}")
        step = self.in_flight.popleft()
        match result:
            case StepDone():
                return self._commit_done(step, result)
            case StepFailed():
                return self._commit_failed(step, result)
            case _:
                assert_never(result)

    def _commit_done(self, step: Step, result: StepDone) -> TokenBatch:
        sampling = step.sampling
        if not len(sampling) == len(result.token_ids) == len(result.finite):
            raise ValueError(
                f"step {step.step_id} has {len(sampling)} sampling rows, its result has "
                f"{len(result.token_ids)} tokens and {len(result.finite)} finite flags"
            )
        for request in step.decoding:
            request.rows_in_flight -= 1
            if request.slot >= 0:  # neither ended nor preempted
                request.num_computed += 1
        for request, row in zip(step.prefilling, step.prefill, strict=True):
            request.rows_in_flight -= 1
            if request.slot >= 0:
                request.num_computed += len(row.token_ids)
        request_ids: list[int] = []
        token_ids: list[int] = []
        finished: list[Finished] = []
        for request, token, finite in zip(sampling, result.token_ids, result.finite, strict=True):
            if request.ended:
                continue
            if not finite:
                # The KV that made them so may be cached, and would end whoever matches it.
                self.cache.forget(self._full_page_keys(request, len(request.tokens)))
                finished.append(self._end(request, FinishReason.ERROR, "non-finite logits"))
                continue
            request.tokens.append(token)
            request_ids.append(request.id)
            token_ids.append(token)
            if token in request.stop_ids or len(request.tokens) == request.end:
                reason = FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH
                self._keep_prefix(request)
                finished.append(self._end(request, reason))
        for request in step.prefilling:
            self._keep_prefix(request)  # so that requests with the same prefix need not wait for its end
        return TokenBatch(tuple(request_ids), tuple(token_ids), tuple(finished), result.path, self.stats())

    def _commit_failed(self, step: Step, result: StepFailed) -> TokenBatch:
        """Ends the requests of the step. Nothing of it becomes matchable: a page is kept by a later commit only."""
        finished = []
        for request in step.decoding + step.prefilling:
            request.rows_in_flight -= 1
            if not request.ended:
                finished.append(self._end(request, FinishReason.ERROR, result.error.partition("\n")[0]))
        return TokenBatch((), (), tuple(finished), "", self.stats())

    def _end(self, request: Request, reason: FinishReason, detail: str = "") -> Finished:
        request.ended = True
        del self.live[request.id]
        if request.slot >= 0:
            self._vacate(request)
        else:
            del self.waiting[request.id]
        return Finished(request.id, reason, request.cached_tokens, detail)

    # Pages

    def _vacate(self, request: Request) -> None:
        """Gives slot and pages away, although a row in flight may still write there.

        All steps run on one stream, so the next owner writes later; and the row lies behind all committed tokens.
        """
        del self.running[request.slot]
        self.free_slots.append(request.slot)
        self._release(request, request.pages)
        request.leave_slot()

    def _keep_prefix(self, request: Request) -> None:
        """Makes the pages that are full and computed matchable. Without a slot, a request has none."""
        keys = self._full_page_keys(request, request.num_computed)
        self.cache.insert(keys, request.pages[: len(keys)])

    def _release(self, request: Request, pages: list[int]) -> None:
        """Releases pages that `request` holds; those that only the prefix tree still holds may be evicted."""
        self.pool.release(pages)
        self.cache.offer(self._full_page_keys(request, len(request.tokens)))

    def _reserve(self, count: int) -> bool:
        """Whether `count` pages are free, after evicting cached ones if need be."""
        self.cache.evict(count - len(self.pool.free))
        return count <= len(self.pool.free)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.bounds.page_size)

    def _matchable_keys(self, request: Request) -> list[bytes]:
        """At least one token is left to compute: its logits are needed."""
        return self._full_page_keys(request, len(request.tokens) - 1)

    def _full_page_keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """Keys of the pages that the request's first `num_tokens` tokens fill; none without a prefix cache."""
        page_size = self.bounds.page_size
        return request.page_keys(page_size, num_tokens // page_size) if self.prefix_cache else []
