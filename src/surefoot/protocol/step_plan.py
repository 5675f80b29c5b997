"""One step of the engine: the only thing that crosses from scheduling to execution.

A plan is recorded before it is launched, so everything here is plain data. Row order of a step: every decode row,
then every prefill row. Decode rows are columns, since there are hundreds and they are alike; prefill rows are objects.
"""

from __future__ import annotations

from msgspec import Struct

from surefoot.protocol.messages import Logprobs, Sampling

NO_COUNT_ROW = -1
NO_PAGE = -1


class Admission(Struct, frozen=True, array_like=True):
    """A slot gets a new owner. Immutable until the slot's next admission."""

    slot: int
    request_id: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    min_tokens: int  # stop ids are not sampled while the sequence (prompt and output) has fewer tokens than this
    logprobs: int  # see GenerateRequest
    prompt_logprobs: int
    count_row: int  # of the pool of token counts, for a request with penalties; else NO_COUNT_ROW
    prompt_length: int
    history: tuple[int, ...]  # with penalties: all tokens of prompt and output that are known; else empty


class PageRun(Struct, frozen=True, array_like=True):
    """Pages that a slot gains, at consecutive columns of one KV group's page table."""

    group: int
    column: int  # of the first one
    pages: tuple[int, ...]  # NO_PAGE: of a cached prefix, and before the group's window


class PrefillRow(Struct, frozen=True, array_like=True):
    """A chunk of known tokens of one request: of its prompt, or of prompt and output after a preemption."""

    request_id: int
    slot: int
    start: int  # tokens whose KV is already in the cache, or in flight before this step on the same stream
    token_ids: tuple[int, ...]  # at least one; their KV is computed by this step
    pages: tuple[PageRun, ...]  # with a slot's first row those of the cached prefix too, which end at `start`
    samples: bool  # whether the last token's logits give the slot's next token
    targets: tuple[int, ...]  # prompt tokens whose logprobs are wanted: targets[i] follows token_ids[i]


class StepPlan(Struct, frozen=True):
    step_id: int
    admissions: tuple[Admission, ...]  # applied first
    page_appends: tuple[tuple[int, int, int, int], ...]  # (group, slot, column, page): decode rows at a page edge
    decode_slots: tuple[int, ...]  # each computes the token that its slot sampled last, and samples the next
    decode_starts: tuple[int, ...]  # tokens before that one, per decode row
    prefill: tuple[PrefillRow, ...]

    @property
    def num_rows(self) -> int:
        return len(self.decode_slots) + len(self.prefill)


class StepDone(Struct, frozen=True, tag=True):
    """Results for the sampling rows in row order: all decode rows, then the prefill rows with `samples`."""

    step_id: int
    token_ids: tuple[int, ...]
    finite: tuple[bool, ...]  # False: the row's logits held NaN or infinity, its token means nothing
    logprobs: tuple[Logprobs, ...]  # of the sampling rows that asked for them, in row order
    prompt_logprobs: tuple[Logprobs, ...]  # of the prefill rows with targets, in row order
    path: str  # key of the ExecutionPath that ran


class StepFailed(Struct, frozen=True, tag=True):
    """The step raised. The device is healthy; what the step wrote must not be read."""

    step_id: int
    error: str  # type, message and innermost frames


StepResult = StepDone | StepFailed
