"""From a step plan to a model's inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import ForwardInputs, Metadata, PrefillSpan, Rows
from surefoot.config.bounds import Bounds
from surefoot.protocol.step_plan import StepPlan
from surefoot.runner.request_table import RequestTable


def rows_of(plan: StepPlan) -> Rows:
    return Rows(
        decode_slots=plan.decode_slots,
        decode_lengths=tuple(start + 1 for start in plan.decode_starts),
        prefill=tuple(PrefillSpan(row.slot, row.start, len(row.token_ids)) for row in plan.prefill),
    )


def check(plan: StepPlan, bounds: Bounds) -> None:
    """Raises ValueError if `plan` exceeds a bound, or asks for what its rows do not have."""
    lengths = itertools.chain(
        (start + 1 for start in plan.decode_starts), (row.start + len(row.token_ids) for row in plan.prefill)
    )
    bounds.check(plan.num_rows, sum(len(row.token_ids) for row in plan.prefill), max(lengths))
    for row in plan.prefill:
        if len(row.targets) > len(row.token_ids):
            raise ValueError(f"a row has {len(row.targets)} targets, more than its {len(row.token_ids)} tokens")
    for admission in plan.admissions:
        if admission.sampling.penalises:
            place, known, prompt = admission.count_row, len(admission.history), admission.prompt_length
            if not 0 <= place < bounds.count_rows:
                raise ValueError(f"a request with penalties has count row {place}, the bound is {bounds.count_rows}")
            if known < prompt:
                raise ValueError(f"a request with penalties has a history of {known} tokens, its prompt has {prompt}")


def new_pages(plan: StepPlan, group: int, page_size: int) -> list[int]:
    """Pages that get a new owner with this step. A first row's pages begin with those that its prefix was found in."""
    pages = [page for of_group, _, _, page in plan.page_appends if of_group == group]
    for row in plan.prefill:
        for run in row.pages:
            if run.group == group:
                pages += run.pages[max(0, row.start // page_size - run.column) :]
    return pages


def build(
    plan: StepPlan, table: RequestTable, page_size: int, make_metadata: Callable[[Rows, Tensor], Metadata]
) -> ForwardInputs[Metadata]:
    """The table must have applied `plan` already. make_metadata: of the attention backend."""
    decode_slots = torch.tensor(plan.decode_slots, dtype=torch.int64)
    token_ids = [table.last_token[decode_slots]]
    slots = [decode_slots]
    positions = [torch.tensor(plan.decode_starts, dtype=torch.int64)]
    sample_rows = list(range(len(plan.decode_slots)))
    num_tokens = len(plan.decode_slots)
    for row in plan.prefill:
        count = len(row.token_ids)
        token_ids.append(torch.tensor(row.token_ids))
        slots.append(torch.full((count,), row.slot))
        positions.append(torch.arange(row.start, row.start + count))
        num_tokens += count
        if row.samples:
            sample_rows.append(num_tokens - 1)
    position = torch.cat(positions)
    pages = table.page_tables[:, torch.cat(slots), position // page_size]
    return ForwardInputs(
        token_ids=torch.cat(token_ids),
        positions=position,
        places=pages * page_size + position % page_size,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        attention=make_metadata(rows_of(plan), table.page_tables),
    )
