"""One step of the engine: the only thing that crosses from scheduling to execution.

A plan is recorded before it is launched, so everything here is plain data. Row order of a step: every decode row,
then every prefill row. Decode rows are columns, since there are hundreds and they are alike; prefill rows are objects.
"""

from __future__ import annotations

from msgspec import Struct

from surefoot.protocol.messages import Sampling


class Admission(Struct, frozen=True, array_like=True):
    """A slot gets a new owner. Immutable until the slot's next admission."""

    slot: int
    request_id: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    min_tokens: int  # stop ids are not sampled while the sequence (prompt and output) has fewer tokens than this


class PrefillRow(Struct, frozen=True, array_like=True):
    """A chunk of known tokens of one request: of its prompt, or of prompt and output after a preemption."""

    request_id: int
    slot: int
    start: int  # tokens whose KV is already in the cache, or in flight before this step on the same stream
    token_ids: tuple[int, ...]  # at least one; their KV is computed by this step
    first_page: int  # column of the slot's page table where `pages` go
    pages: tuple[int, ...]  # pages that the slot gains with this row: cached ones first, then new ones
    samples: bool  # whether the last token's logits give the slot's next token


class StepPlan(Struct, frozen=True):
    step_id: int
    admissions: tuple[Admission, ...]  # applied first
    page_appends: tuple[tuple[int, int, int], ...]  # (slot, column, page) for decode rows that cross a page edge
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
    path: str  # key of the ExecutionPath that ran


class StepFailed(Struct, frozen=True, tag=True):
    """The step raised. The device is healthy; what the step wrote must not be read."""

    step_id: int
    error: str  # type, message and innermost frames


StepResult = StepDone | StepFailed
