"""An executor with KV memory by page, that runs late and is as strict as a device.

Its model is a checksum of the tokens that it *reads back through the page table*, so a page that was released too
early, a wrong slot or a bad match changes the tokens, if it does not raise here at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import msgspec

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import GenerateRequest
from surefoot.protocol.step_plan import Admission, StepDone, StepFailed, StepPlan, StepResult

VOCAB = 29
NAN = -1  # in the place of a token: its KV, and all logits computed from it, are not finite
DIRTY = -2  # a failed step wrote here: must never be read


def next_token(tokens: Sequence[int], request: GenerateRequest) -> int:
    """The model and its sampler. Before `min_new_tokens`, stop ids are not drawn."""
    token = crc32(bytes(tokens), request.sampling.seed) % VOCAB
    if len(tokens) < len(request.prompt_ids) + request.min_new_tokens:
        while token in request.stop_ids:
            token = (token + 1) % VOCAB
    return token


def continuation(request: GenerateRequest) -> list[int]:
    """What `request` must be answered with, computed directly."""
    tokens = list(request.prompt_ids)
    new: list[int] = []
    while len(new) < request.max_new_tokens and (not new or new[-1] not in request.stop_ids):
        new.append(next_token(tokens, request))
        tokens.append(new[-1])
    return new


@dataclass(frozen=True)
class Faults:
    """How often the device misbehaves, from 0 to 1."""

    failed_step: float = 0
    bad_row: float = 0  # one row of a step becomes non-finite


@dataclass
class Slot:
    owner: GenerateRequest
    table: list[int]
    last_token: int = NAN
    discarded: bool = False  # its owner was in a failed step: rows that were launched before that is known mean nothing


@dataclass(eq=False)
class Launched:
    plan: StepPlan
    received: StepPlan  # as it arrives on the other side of the wire
    requests: Mapping[int, GenerateRequest]  # of the admissions, by id
    device: FakeDevice

    def wait(self) -> StepResult:
        return self.device.execute(self)


@dataclass
class FakeDevice:
    bounds: Bounds
    requests: Mapping[int, GenerateRequest]  # those alive, by id; kept up to date by the owner
    random: Random = field(default_factory=lambda: Random(0))
    faults: Faults = Faults()
    plans: list[bytes] = field(default_factory=list)  # every launched plan, encoded
    failed_requests: list[int] = field(default_factory=list)  # ids in the step that failed last
    non_finite: list[int] = field(default_factory=list)  # ids whose row was not finite in the last step
    tokens_computed: int = 0

    def __post_init__(self) -> None:
        # (namespace, position, token) by page and place
        self.kv = [[("", -1, DIRTY)] * self.bounds.page_size for _ in range(self.bounds.num_pages)]
        self.slots: dict[int, Slot] = {}
        self.queue: deque[Launched] = deque()

    # Launch: checks of the plan as such

    def launch(self, plan: StepPlan) -> Launched:
        wire = msgspec.msgpack.encode(plan)
        received = msgspec.msgpack.decode(wire, type=StepPlan)
        assert received == plan
        self.plans.append(wire)
        self.check(plan)
        requests = {admission.request_id: self.requests[admission.request_id] for admission in plan.admissions}
        launched = Launched(plan, received, requests, self)
        self.queue.append(launched)
        return launched

    def check(self, plan: StepPlan) -> None:
        assert all(row.token_ids for row in plan.prefill), "a row must compute at least one token"
        prefill_tokens = sum(len(row.token_ids) for row in plan.prefill)
        ends = [start + 1 for start in plan.decode_starts] + [row.start + len(row.token_ids) for row in plan.prefill]
        self.bounds.check(plan.num_rows, prefill_tokens, max(ends))
        slots = [*plan.decode_slots, *(row.slot for row in plan.prefill)]
        assert len(set(slots)) == len(slots), f"a slot has two rows: {slots}"
        assert len(plan.decode_slots) == len(plan.decode_starts)
        assert all(0 <= slot < self.bounds.max_running_requests for slot in slots)
        prefilling = {row.slot for row in plan.prefill}
        assert all(admission.slot in prefilling for admission in plan.admissions), "an admission without a row"
        assert all(slot in plan.decode_slots for slot, _, _ in plan.page_appends), "a page for a slot without a row"

    # Execution, when the result is asked for

    def execute(self, launched: Launched) -> StepResult:
        assert self.queue.popleft() is launched, "steps are executed in the order of their launch"
        plan = launched.received
        self.failed_requests, self.non_finite = [], []
        if self.random.random() < self.faults.failed_step:
            return self.fail(launched)
        self.set_tables(launched)
        bad_row = self.random.randrange(plan.num_rows) if self.random.random() < self.faults.bad_row else -1
        token_ids, finite = [], []
        for i, (slot_id, start) in enumerate(zip(plan.decode_slots, plan.decode_starts, strict=True)):
            slot = self.slots[slot_id]
            token = slot.last_token if i != bad_row else NAN
            token_ids.append(self.compute(slot, start, (token,), samples=True))
            finite.append(token_ids[-1] != NAN)
        for i, row in enumerate(plan.prefill, start=len(plan.decode_slots)):
            slot = self.slots[row.slot]
            assert slot.owner.id == row.request_id, "the slot was not admitted for this row's request"
            chunk = row.token_ids if i != bad_row else (NAN,) * len(row.token_ids)
            token = self.compute(slot, row.start, chunk, row.samples)
            if row.samples:
                token_ids.append(token)
                finite.append(token != NAN)
        return StepDone(plan.step_id, tuple(token_ids), tuple(finite), "fake")

    def set_tables(self, launched: Launched) -> None:
        plan = launched.received
        for admission in plan.admissions:
            request = launched.requests[admission.request_id]
            min_tokens = len(request.prompt_ids) + request.min_new_tokens
            expected = Admission(admission.slot, request.id, request.sampling, request.stop_ids, min_tokens)
            assert admission == expected, "the admission does not say what the request asked for"
            self.slots[admission.slot] = Slot(request, [])
        for slot, column, page in plan.page_appends:
            self.gain(self.slots[slot], column, (page,))
        for row in plan.prefill:
            self.gain(self.slots[row.slot], row.first_page, row.pages)

    def gain(self, slot: Slot, column: int, pages: Sequence[int]) -> None:
        if not pages:
            return
        assert column == len(slot.table), f"column {column} of a table of {len(slot.table)}"
        assert column + len(pages) <= self.bounds.page_table_columns, "a page table has too many columns"
        slot.table[column:] = pages

    def compute(self, slot: Slot, start: int, chunk: Sequence[int], samples: bool) -> int:
        """Writes the chunk's KV, then reads the whole sequence back. NAN without a meaningful token."""
        if slot.discarded:
            return NAN
        namespace = slot.owner.cache_namespace
        self.write(slot, start, chunk)
        self.tokens_computed += len(chunk)
        tokens = []
        for position in range(start + len(chunk)):
            page = slot.table[position // self.bounds.page_size]
            found_namespace, found_position, token = self.kv[page][position % self.bounds.page_size]
            assert token != DIRTY, f"page {page} is read, but no step that succeeded has written it"
            assert found_position == position, f"page {page} holds position {found_position}, not {position}"
            assert found_namespace == namespace, f"page {page} belongs to namespace {found_namespace!r}"
            tokens.append(token)
        if not samples:
            return NAN
        slot.last_token = NAN if NAN in tokens else next_token(tokens, slot.owner)
        if slot.last_token == NAN:
            self.non_finite.append(slot.owner.id)
        return slot.last_token

    def write(self, slot: Slot, start: int, chunk: Sequence[int]) -> None:
        for position, token in enumerate(chunk, start):
            page = slot.table[position // self.bounds.page_size]
            entry = (slot.owner.cache_namespace, position, token)
            self.kv[page][position % self.bounds.page_size] = entry

    def fail(self, launched: Launched) -> StepFailed:
        """The step raises, before or after it has written what it should."""
        plan = launched.received
        self.set_tables(launched)
        rows = [(slot, start, 1) for slot, start in zip(plan.decode_slots, plan.decode_starts, strict=True)]
        rows += [(row.slot, row.start, len(row.token_ids)) for row in plan.prefill]
        has_written = self.random.random() < 0.7
        for slot_id, start, count in rows:
            slot = self.slots[slot_id]
            if has_written and not slot.discarded:
                self.write(slot, start, (DIRTY,) * count)
            slot.discarded = True
            self.failed_requests.append(slot.owner.id)
        return StepFailed(plan.step_id, "RuntimeError: injected")
