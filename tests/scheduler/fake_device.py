"""An executor with KV memory by group and page, that runs late and is as strict as a device.

What it writes for a token is a checksum of the whole sequence up to it. Every row reads back all places that its tokens
see, through its slot's page tables, and each must hold what this very sequence has there: a page that was released too
early, a wrong slot, a window off by one or a bad match raise here at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import msgspec

from surefoot.config.bounds import Bounds
from surefoot.protocol.messages import GenerateRequest, Logprobs
from surefoot.protocol.step_plan import (
    NO_COUNT_ROW,
    NO_PAGE,
    Admission,
    PrefillRow,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
)

VOCAB = 29
NAN = -1  # in the place of a checksum or a token: this KV, and all logits computed from it, are not finite
DIRTY = -2  # a failed step wrote here: must never be read

Place = tuple[str, int, int]  # namespace, position, checksum


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


def logprobs_at(positions: Sequence[int], tokens: Sequence[int], request_id: int, top: int) -> Logprobs:
    """Made up, of the token that `tokens` has at each position."""
    return Logprobs(
        request_id=request_id,
        chosen=tuple(-position - tokens[position] / VOCAB for position in positions),
        top_ids=tuple(tuple(range(top)) for _ in positions),
        top_logprobs=tuple((-0.5,) * top for _ in positions),
    )


@dataclass(frozen=True)
class Faults:
    """How often the device misbehaves, from 0 to 1."""

    failed_step: float = 0
    bad_row: float = 0  # one row of a step becomes non-finite


@dataclass
class Slot:
    admission: Admission
    owner: GenerateRequest
    tokens: list[
        int
    ]  # prompt and all that follows: what it has not come to yet, and what stray rows sample after a stop
    places: list[Place]  # what the KV of each of them must be
    tables: list[list[int]]  # per KV group
    last_token: int = NAN
    discarded: bool = False  # its owner was in a failed step: rows that were launched before that is known mean nothing


def make_slot(admission: Admission, owner: GenerateRequest, num_groups: int) -> Slot:
    tokens = list(owner.prompt_ids)
    for _ in range(owner.max_new_tokens):
        tokens.append(next_token(tokens, owner))
    places, checksum = [], 0
    for position, token in enumerate(tokens):
        checksum = crc32(bytes((token,)), checksum)
        places.append((owner.cache_namespace, position, checksum))
    return Slot(admission, owner, tokens, places, [[] for _ in range(num_groups)])


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
        empty = ("", -1, DIRTY)
        self.kv = [[[empty] * self.bounds.page_size for _ in range(group.num_pages)] for group in self.bounds.kv_groups]
        self.counted: list[list[int]] = [[] for _ in range(self.bounds.count_rows)]  # tokens in each count row
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
        assert all(0 <= slot < self.bounds.max_running_requests for slot in slots), f"rows of slots {slots}"
        prefilling = {row.slot for row in plan.prefill}
        assert all(admission.slot in prefilling for admission in plan.admissions), "an admission without a row"
        assert all(slot in plan.decode_slots for _, slot, _, _ in plan.page_appends), "a page for a slot without a row"
        new = [(group, page) for group, _, _, page in plan.page_appends]
        for row in plan.prefill:
            cached = row.start // self.bounds.page_size
            new += [(run.group, page) for run in row.pages for page in run.pages[max(0, cached - run.column) :]]
        assert len(set(new)) == len(new), f"a (group, page) gets two new owners: {new}"

    # Execution, when the result is asked for

    def execute(self, launched: Launched) -> StepResult:
        assert self.queue.popleft() is launched, "steps are executed in the order of their launch"
        plan = launched.received
        self.failed_requests, self.non_finite = [], []
        if self.random.random() < self.faults.failed_step:
            return self.fail(launched)
        self.set_tables(launched)
        bad_row = self.random.randrange(plan.num_rows) if self.random.random() < self.faults.bad_row else -1
        sampled: list[tuple[Slot, int, int]] = []  # slot, position of its new token, token
        prompt_logprobs = []
        for i, (slot_id, start) in enumerate(zip(plan.decode_slots, plan.decode_starts, strict=True)):
            slot = self.slots[slot_id]
            token = self.compute(slot, start, (slot.last_token,), samples=True, bad=i == bad_row)
            sampled.append((slot, start + 1, token))
        for i, row in enumerate(plan.prefill, start=len(plan.decode_slots)):
            slot = self.slots[row.slot]
            assert slot.owner.id == row.request_id, "the slot was not admitted for this row's request"
            token = self.compute(slot, row.start, row.token_ids, row.samples, bad=i == bad_row)
            prompt_logprobs += self.score(slot, row)
            if row.samples:
                sampled.append((slot, row.start + len(row.token_ids), token))
        return StepDone(
            step_id=plan.step_id,
            token_ids=tuple(token for _, _, token in sampled),
            finite=tuple(token != NAN for _, _, token in sampled),
            logprobs=tuple(
                logprobs_at((position,), slot.tokens, slot.owner.id, slot.admission.logprobs)
                for slot, position, _ in sampled
                if slot.admission.logprobs >= 0 and not slot.discarded
            ),
            prompt_logprobs=tuple(prompt_logprobs),
            path="fake",
        )

    def set_tables(self, launched: Launched) -> None:
        plan = launched.received
        for admission in plan.admissions:
            slot = make_slot(admission, launched.requests[admission.request_id], len(self.bounds.kv_groups))
            self.check_admission(slot)
            self.slots[admission.slot] = slot
            if slot.owner.sampling.penalises:
                self.counted[admission.count_row] = list(admission.history)
        for group, slot_id, column, page in plan.page_appends:
            self.gain(self.slots[slot_id], group, column, (page,))
        for row in plan.prefill:
            for run in row.pages:
                self.gain(self.slots[row.slot], run.group, run.column, run.pages)

    def check_admission(self, slot: Slot) -> None:
        request, said = slot.owner, slot.admission
        history = said.history
        assert said == Admission(
            slot=said.slot,
            request_id=request.id,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            min_tokens=len(request.prompt_ids) + request.min_new_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            count_row=said.count_row if request.sampling.penalises else NO_COUNT_ROW,
            prompt_length=len(request.prompt_ids),
            history=tuple(slot.tokens[: len(history)]) if request.sampling.penalises else (),
        ), "the admission does not say what the request asked for"
        assert not request.sampling.penalises or 0 <= said.count_row < self.bounds.count_rows

    def gain(self, slot: Slot, group: int, column: int, pages: Sequence[int]) -> None:
        assert pages, "an empty run of pages"
        table = slot.tables[group]
        assert column == len(table), f"column {column} of a table of {len(table)}"
        assert column + len(pages) <= self.bounds.page_table_columns, "a page table has too many columns"
        table += pages

    def compute(self, slot: Slot, start: int, chunk: Sequence[int], samples: bool, bad: bool) -> int:
        """Writes the chunk's KV, then reads back all that its tokens see. NAN without a meaningful token."""
        if slot.discarded:
            return NAN
        end = start + len(chunk)
        self.tokens_computed += len(chunk)
        finite = not bad and NAN not in chunk
        if finite:
            assert list(chunk) == slot.tokens[start:end], f"tokens {chunk} at position {start} are not the sequence's"
            self.write(slot, start, slot.places[start:end])
        else:
            self.write(slot, start, [(slot.owner.cache_namespace, i, NAN) for i in range(start, end)])
        for group in range(len(self.bounds.kv_groups)):
            finite &= self.read(slot, group, start, end)
        if not samples:
            return NAN
        if finite and slot.owner.sampling.penalises:
            counted = self.counted[slot.admission.count_row]
            assert counted == slot.tokens[:end], f"the count row holds {counted}, not {slot.tokens[:end]}"
            counted.append(slot.tokens[end])
        slot.last_token = slot.tokens[end] if finite else NAN
        if not finite:
            self.non_finite.append(slot.owner.id)
        return slot.last_token

    def read(self, slot: Slot, group: int, start: int, end: int) -> bool:
        """Of what tokens `start` to `end` see in `group`; whether it is all finite."""
        window, size = self.bounds.kv_groups[group].window, self.bounds.page_size
        first = max(0, start - window + 1) if window else 0
        finite = True
        for position in range(first, end):
            page = slot.tables[group][position // size]
            assert page != NO_PAGE, f"position {position} of group {group} is seen, but has no page"
            namespace, found, checksum = self.kv[group][page][position % size]
            assert checksum != DIRTY, f"page {page} of group {group} is read, but no step that succeeded has written it"
            assert found == position, f"page {page} of group {group} holds position {found}, not {position}"
            assert namespace == slot.owner.cache_namespace, f"page {page} belongs to namespace {namespace!r}"
            assert checksum in (NAN, slot.places[position][2]), f"page {page} of group {group} is of another sequence"
            finite &= checksum != NAN
        return finite

    def write(self, slot: Slot, start: int, places: Sequence[Place]) -> None:
        for group, table in enumerate(slot.tables):
            for position, place in enumerate(places, start):
                page = table[position // self.bounds.page_size]
                assert page != NO_PAGE, f"position {position} of group {group} is written, but has no page"
                self.kv[group][page][position % self.bounds.page_size] = place

    def score(self, slot: Slot, row: PrefillRow) -> list[Logprobs]:
        """Of a slot that a failed step has left to nobody, a device may or may not tell anything."""
        if not row.targets or (slot.discarded and self.random.random() < 0.5):
            return []
        positions = range(row.start + 1, row.start + 1 + len(row.targets))
        assert positions[-1] < len(slot.owner.prompt_ids), "a target is not a prompt token"
        assert list(row.targets) == [slot.tokens[position] for position in positions], "targets are not what follows"
        return [logprobs_at(positions, slot.tokens, slot.owner.id, slot.owner.prompt_logprobs)]

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
                self.write(slot, start, [(slot.owner.cache_namespace, i, DIRTY) for i in range(start, start + count)])
            slot.discarded = True
            self.failed_requests.append(slot.owner.id)
        return StepFailed(plan.step_id, "RuntimeError: injected")
