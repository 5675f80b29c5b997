"""Who runs next: commands and results in, step plans and events out.

    apply(command)        a request is queued, refused or aborted
    plan()                every decode row, then prefill chunks: of running requests, then of newly admitted ones
    commit(plan, result)  the only place where results become state

A deterministic function of its calls. `plan` may be called once more before the last step's `commit` (lookahead 1):
it never needs a token's value, and `commit` goes by the request object that a row was planned for, not by its id.

Pages are held before a row enters a step. If a decode row finds none at a page edge, the last admitted of the least
urgent requests is preempted. The order of `running` is the order of rows, so a victim has no row in the step yet.
"""

from __future__ import annotations

from collections import deque
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
from surefoot.protocol.step_plan import PageRun, StepDone, StepFailed, StepPlan
from surefoot.scheduler.kv_groups import KVGroups
from surefoot.scheduler.request import Request, why_impossible
from surefoot.scheduler.step import Step
from surefoot.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    def __init__(self, bounds: Bounds, prefix_cache: bool) -> None:
        self.bounds = bounds
        self.kv = KVGroups(bounds, prefix_cache)
        self.free_slots = list(range(bounds.max_running_requests - 1, -1, -1))
        self.free_count_rows = list(range(bounds.count_rows - 1, -1, -1))
        self.live: dict[int, Request] = {}  # by id: waiting or running
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}  # by slot; most urgent ones first, then in order of admission
        self.in_flight: deque[Step] = deque()
        self.accepted = 0
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
            pages=self.kv.stats(),
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
        request = Request(asked, arrival=self.accepted)
        self.accepted += 1
        self.live[request.id] = request
        self.waiting.add(request)
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
        self.kv.keep_prefix(request)
        finished = self._end(request, FinishReason.ABORTED)
        return TokenBatch((), (), (finished,), (), (), "", self.stats())

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
            # All groups have as many columns once the prompt is computed, and reach a page edge together.
            if start == len(request.pages[0]) * page_size and not self._add_pages(step, request):
                continue
            request.num_planned = start + 1
            request.rows_in_flight += 1
            decoding.append(request)
            starts.append(start)

    def _add_pages(self, step: Step, request: Request) -> bool:
        """One page of each group for a decode row, by preemption if need be; False if `request` itself went for it.

        Victims have no row in the step that is being planned: decode rows are planned in the order of `running` and
        before all others, the victim is the last one there, so at the latest it is `request`.
        """
        while not self.kv.extend_output(request):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        for group, pages in enumerate(request.pages):
            step.page_appends.append((group, request.slot, len(pages) - 1, pages[-1]))
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue. Tokens are kept, also one that a row in flight will bring."""
        self.kv.keep_prefix(request)
        self._vacate(request)
        request.preempted = True
        self.preemptions += 1
        self.waiting.add(request)

    def _add_prefill_rows(self, step: Step, budget: int) -> int:
        """The next chunks of running requests. Returns what is left of `budget` tokens.

        With all pages at admission, only a group with a window can be short here: pages that the request has released
        may be shared with others. It preempts itself then, as it has no row in this step. This ends: the first request
        that prefills gets the whole budget, until it decodes or leaves, and alone it always fits.
        """
        for request in list(self.running.values()):
            if budget == 0:
                break
            if request.tail_on_device:
                continue
            columns = [len(pages) for pages in request.pages]
            if self.kv.extend_prompt(request):
                budget -= step.prefill_chunk(request, budget, _page_runs(request, columns))
            else:
                self._preempt(request)
        return budget

    def _admit(self, step: Step, budget: int) -> None:
        while budget and self.free_slots:
            request = self.waiting.choose(self._is_eligible, self.kv.count_cached)
            # A preempted request waits for its rows in flight: they bring a token that it must be recomputed with.
            # And if the chosen one does not fit, nobody smaller passes by: it would wait for ever.
            if request is None or request.rows_in_flight or not self._seat(request):
                return
            step.admit(request)
            budget -= step.prefill_chunk(request, budget, _page_runs(request, [0] * len(request.pages)))

    def _is_eligible(self, request: Request) -> bool:
        """Whether it may be admitted now, pages and slots aside.

        Penalties need a count row. And a sibling waits for the first of its group, to share the pages of their prompt:
        not for one that itself waits for another, so that nobody waits in a circle.
        """
        if request.penalises and not self.free_count_rows:
            return False
        if request.leads or not self.kv.may_match(request):
            return True
        leader = self.live.get(request.asked.group_id)
        return leader is None or not leader.leads or leader.has_output

    def _seat(self, request: Request) -> bool:
        """Gives a waiting request pages, a slot, and a count row if it needs one; False if pages are short."""
        if not self.kv.seat(request):
            if not self.running:
                raise RuntimeError(f"request {request.id} does not fit although nobody runs: pages were lost")
            return False
        self.waiting.take(request, self._is_eligible)
        request.slot = self.free_slots.pop()
        if request.penalises:
            request.count_row = self.free_count_rows.pop()
        is_last = not self.running or next(reversed(self.running.values())).priority <= request.priority
        self.running[request.slot] = request
        if not is_last:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].priority))
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
        step.check(result, sampling)
        for request in step.decoding:
            request.rows_in_flight -= 1
            if request.slot >= 0:  # neither ended nor preempted
                request.num_computed += 1
        for request, row in zip(step.prefilling, step.prefill, strict=True):
            request.rows_in_flight -= 1
            if request.slot >= 0:
                request.num_computed += len(row.token_ids)
        finished = [] if all(result.finite) else self._end_non_finite(sampling, result)
        # Before tokens end requests: they have their last token's logprob too.
        logprobs = tuple(step.live_logprobs(result, sampling))
        prompt_logprobs = tuple(step.take_prompt_logprobs(result))
        request_ids: list[int] = []
        token_ids: list[int] = []
        for request, token in zip(sampling, result.token_ids, strict=True):
            if request.ended:
                continue
            request.tokens.append(token)
            request_ids.append(request.id)
            token_ids.append(token)
            if token in request.stop_ids or len(request.tokens) == request.end:
                reason = FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH
                self.kv.keep_prefix(request)
                finished.append(self._end(request, reason))
        for request in step.prefilling:
            self.kv.keep_prefix(request)  # so that requests with the same prefix need not wait for its end
        return TokenBatch(
            request_ids=tuple(request_ids),
            token_ids=tuple(token_ids),
            finished=tuple(finished),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            path=result.path,
            stats=self.stats(),
        )

    def _end_non_finite(self, sampling: list[Request], result: StepDone) -> list[Finished]:
        finished = []
        for request, finite in zip(sampling, result.finite, strict=True):
            if not finite and not request.ended:
                # The KV that made them so may be cached, and would end whoever matches it.
                self.kv.forget(request)
                finished.append(self._end(request, FinishReason.ERROR, "non-finite logits"))
        return finished

    def _commit_failed(self, step: Step, result: StepFailed) -> TokenBatch:
        """Ends the requests of the step. Nothing of it becomes matchable: a page is kept by a later commit only."""
        finished = []
        for request in step.decoding + step.prefilling:
            request.rows_in_flight -= 1
            if not request.ended:
                finished.append(self._end(request, FinishReason.ERROR, result.error.partition("\n")[0]))
        return TokenBatch((), (), tuple(finished), (), (), "", self.stats())

    def _end(self, request: Request, reason: FinishReason, detail: str = "") -> Finished:
        request.ended = True
        del self.live[request.id]
        if request.slot >= 0:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        return Finished(request.id, reason, request.cached_tokens, detail)

    def _vacate(self, request: Request) -> None:
        """Gives slot, count row and pages away, although a row in flight may still write there.

        All steps run on one stream, so the next owner writes later; and the row lies behind all committed tokens.
        """
        del self.running[request.slot]
        self.free_slots.append(request.slot)
        if request.penalises:
            self.free_count_rows.append(request.count_row)
        self.kv.release(request)


def _page_runs(request: Request, columns: list[int]) -> tuple[PageRun, ...]:
    """What a request's page tables have gained since they had so many columns."""
    gained = zip(request.pages, columns, strict=True)
    return tuple(
        [PageRun(g, first, tuple(pages[first:])) for g, (pages, first) in enumerate(gained) if len(pages) > first]
    )
