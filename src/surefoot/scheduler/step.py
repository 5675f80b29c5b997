"""A step between `plan` and `commit`: what goes into the plan, and the request behind every row."""

from __future__ import annotations

from surefoot.protocol.messages import Logprobs
from surefoot.protocol.step_plan import Admission, PageRun, PrefillRow, StepDone, StepPlan
from surefoot.scheduler.request import Request


class Step:
    __slots__ = ("admissions", "decode_starts", "decoding", "page_appends", "prefill", "prefilling", "step_id")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.admissions: list[Admission] = []
        self.page_appends: list[tuple[int, int, int, int]] = []
        self.decode_starts: list[int] = []
        self.decoding: list[Request] = []  # one per decode row
        self.prefill: list[PrefillRow] = []
        self.prefilling: list[Request] = []  # one per prefill row

    def admit(self, request: Request) -> None:
        """Tells the device whose the request's slot is now. A prefill row of this step must follow."""
        asked = request.asked
        self.admissions.append(
            Admission(
                slot=request.slot,
                request_id=request.id,
                sampling=asked.sampling,
                stop_ids=asked.stop_ids,
                min_tokens=len(asked.prompt_ids) + asked.min_new_tokens,
                logprobs=asked.logprobs,
                prompt_logprobs=asked.prompt_logprobs,
                count_row=request.count_row,
                prompt_length=len(asked.prompt_ids),
                history=tuple(request.tokens) if request.penalises else (),
            )
        )

    def prefill_chunk(self, request: Request, most: int, pages: tuple[PageRun, ...]) -> int:
        """A row for at most `most` of the request's tokens that are not computed yet. Returns for how many."""
        start = request.num_planned
        chunk = tuple(request.tokens[start : start + most])
        end = start + len(chunk)
        # A resumed request computes tokens anew whose logprobs were delivered: `commit` drops those, and a row that
        # would have no others has no targets.
        last_target = min(end + 1, len(request.asked.prompt_ids))
        targets = tuple(request.tokens[start + 1 : last_target]) if last_target > request.num_scored else ()
        request.num_planned = end
        request.tail_on_device = end == len(request.tokens)
        request.rows_in_flight += 1
        self.prefilling.append(request)
        self.prefill.append(
            PrefillRow(
                request_id=request.id,
                slot=request.slot,
                start=start,
                token_ids=chunk,
                pages=pages,
                samples=request.tail_on_device,
                targets=targets,
            )
        )
        return len(chunk)

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

    def check(self, result: StepDone, sampling: list[Request]) -> None:
        """Raises ValueError if `result` has not one token and one finite flag for each sampling row."""
        if not len(sampling) == len(result.token_ids) == len(result.finite):
            raise ValueError(
                f"step {self.step_id} has {len(sampling)} sampling rows, its result has "
                f"{len(result.token_ids)} tokens and {len(result.finite)} finite flags"
            )

    def live_logprobs(self, result: StepDone, sampling: list[Request]) -> list[Logprobs]:
        """Those of the tokens of live requests that asked for them. Raises ValueError if one is missing."""
        asking = [request for request in sampling if request.wants_logprobs]
        if not asking:
            return []
        by_id = {logprobs.request_id: logprobs for logprobs in result.logprobs}
        return [self._checked(by_id, request, 1) for request in asking if not request.ended]

    def take_prompt_logprobs(self, result: StepDone) -> list[Logprobs]:
        """Those of live requests, without what was delivered before a preemption. Counts them as delivered.

        Raises ValueError if one is missing.
        """
        by_id = {logprobs.request_id: logprobs for logprobs in result.prompt_logprobs}
        taken = []
        for request, row in zip(self.prefilling, self.prefill, strict=True):
            if row.targets and not request.ended:
                known = request.num_scored - (row.start + 1)
                request.num_scored += len(row.targets) - known
                scored = self._checked(by_id, request, len(row.targets))
                taken.append(_without_first(scored, known) if known else scored)
        return taken

    def _checked(self, by_id: dict[int, Logprobs], request: Request, count: int) -> Logprobs:
        logprobs = by_id.get(request.id)
        if logprobs is None or len(logprobs.chosen) != count:
            raise ValueError(f"the result of step {self.step_id} lacks {count} logprobs of request {request.id}")
        return logprobs


def _without_first(logprobs: Logprobs, count: int) -> Logprobs:
    return Logprobs(
        request_id=logprobs.request_id,
        chosen=logprobs.chosen[count:],
        top_ids=logprobs.top_ids[count:],
        top_logprobs=logprobs.top_logprobs[count:],
    )
