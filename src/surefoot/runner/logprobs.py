"""Logprobs as messages: of the tokens that a step sampled, and of the prompt tokens that its prefill rows score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.kernels.logprobs import token_logprobs
from surefoot.protocol.messages import Logprobs
from surefoot.protocol.step_plan import StepPlan
from surefoot.runner.request_table import RequestTable
from surefoot.runner.sampler import SamplingRows

Columns = tuple[list[float], list[list[int]], list[list[float]]]  # of positions: chosen, top ids, top logprobs


def output_logprobs(logits: Tensor, rows: SamplingRows, token_ids: Tensor) -> tuple[Logprobs, ...]:
    """logits: [rows.scored, vocab] fp32, the model's own; token_ids: [rows] int64, what was drawn in the end."""
    if not rows.scored:
        return ()
    owners = [rows.owners[row] for row in rows.scored]
    scores = token_logprobs(logits, token_ids[list(rows.scored)], max(owner.logprobs for owner in owners))
    columns = _columns([scores])
    return tuple(
        _message(owner.request_id, owner.logprobs, columns, slice(at, at + 1)) for at, owner in enumerate(owners)
    )


def prompt_logprobs(
    plan: StepPlan, table: RequestTable, hidden: Tensor, head: Callable[[Tensor], Tensor], rows_at_once: int
) -> tuple[Logprobs, ...]:
    """hidden: [tokens, hidden] of all tokens of the step; head: gives fp32 logits [rows, vocab], of `rows_at_once`
    rows at most, since those of a whole chunk would not fit the memory that the plan set aside."""
    places: list[int] = []  # rows of `hidden` whose next token is scored
    targets: list[int] = []
    first = len(plan.decode_slots)
    for row in plan.prefill:
        places += range(first, first + len(row.targets))
        targets += row.targets
        first += len(row.token_ids)
    if not targets:
        return ()
    scored = [row for row in plan.prefill if row.targets]
    # A row whose slot was disowned means nothing, but is still a row: it gets no top tokens.
    counts = [max(0, table.owners[row.slot].prompt_logprobs) for row in scored]
    parts = []
    for at in range(0, len(places), rows_at_once):
        part = slice(at, at + rows_at_once)
        logits = head(hidden.index_select(0, torch.tensor(places[part])))
        parts.append(token_logprobs(logits, torch.tensor(targets[part]), max(counts)))
    columns = _columns(parts)
    messages = []
    at = 0
    for row, count in zip(scored, counts, strict=True):
        messages.append(_message(row.request_id, count, columns, slice(at, at + len(row.targets))))
        at += len(row.targets)
    return tuple(messages)


def _columns(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Columns:
    chosen, top_ids, top_logprobs = (torch.cat(column).tolist() for column in zip(*parts, strict=True))
    return chosen, top_ids, top_logprobs


def _message(request_id: int, count: int, columns: Columns, positions: slice) -> Logprobs:
    chosen, top_ids, top_logprobs = columns
    return Logprobs(
        request_id,
        tuple(chosen[positions]),
        tuple(tuple(ids[:count]) for ids in top_ids[positions]),
        tuple(tuple(logprobs[:count]) for logprobs in top_logprobs[positions]),
    )
