"""Draws the next token of every sampling row of a step.

Logits are changed in this order: bias, penalties, bans (stop ids before min_tokens), temperature, truncation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.config.paths import SamplerKind
from surefoot.kernels.penalties import penalise
from surefoot.kernels.sampling import draw, truncate
from surefoot.protocol.messages import NO_LOGPROBS
from surefoot.protocol.step_plan import StepPlan
from surefoot.runner.request_table import RequestTable


class SamplingRows:
    """The sampling rows of one step: decode rows, then the prefill rows with `samples`. Rows are named by their place
    among these."""

    def __init__(self, plan: StepPlan, table: RequestTable) -> None:
        sampling_prefill = [row for row in plan.prefill if row.samples]
        self.slots = (*plan.decode_slots, *(row.slot for row in sampling_prefill))
        # The position of the token to draw: the number of tokens before it.
        self.positions = (
            *(start + 1 for start in plan.decode_starts),
            *(row.start + len(row.token_ids) for row in sampling_prefill),
        )
        self.owners = tuple(table.owners[slot] for slot in self.slots)
        rows = tuple(enumerate(self.owners))
        self.biased = tuple(row for row, owner in rows if owner.sampling.logit_bias)
        self.penalised = tuple(row for row, owner in rows if owner.sampling.penalises)
        self.banned = tuple(
            (row, owner.stop_ids) for row, owner in rows if owner.stop_ids and self.positions[row] < owner.min_tokens
        )
        self.scored = tuple(row for row, owner in rows if owner.logprobs != NO_LOGPROBS)
        self.truncated = any(owner.sampling.truncates for owner in self.owners)
        self.greedy = all(owner.sampling.greedy for owner in self.owners)
        if not rows:
            self.kind = SamplerKind.NONE
        elif self.biased or self.penalised or self.banned or self.truncated:
            self.kind = SamplerKind.FULL
        else:
            self.kind = SamplerKind.GREEDY if self.greedy else SamplerKind.PLAIN


Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]  # see kernels.sampling.greedy


def sample(logits: Tensor, rows: SamplingRows, table: RequestTable, greedy: Greedy) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] fp32, overwritten. Returns token ids [rows] int64, and [rows] bool: all logits finite."""
    if rows.kind is SamplerKind.NONE:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    likeliest, finite = greedy(logits)
    if rows.kind is SamplerKind.GREEDY:
        return likeliest, finite
    _bias(logits, rows, table)
    _penalise(logits, rows, table)
    for row, stop_ids in rows.banned:
        logits[row, list(stop_ids)] = -torch.inf
    if rows.greedy:
        return greedy(logits)[0], finite
    slots = torch.tensor(rows.slots)
    temperatures = table.temperature[slots]
    logits /= temperatures.masked_fill(temperatures == 0, 1)[:, None]
    if rows.truncated:
        logits = truncate(logits, table.top_k[slots], table.top_p[slots], table.min_p[slots])
    return draw(logits, temperatures, table.seed[slots], torch.tensor(rows.positions)), finite


def _bias(logits: Tensor, rows: SamplingRows, table: RequestTable) -> None:
    if rows.biased:
        biases = [table.biases[rows.slots[row]] for row in rows.biased]
        index = torch.cat([torch.full_like(ids, row) for row, (ids, _) in zip(rows.biased, biases, strict=True)])
        tokens, values = (torch.cat(column) for column in zip(*biases, strict=True))
        logits.index_put_((index, tokens), values, accumulate=True)


def _penalise(logits: Tensor, rows: SamplingRows, table: RequestTable) -> None:
    if rows.penalised:
        slots = torch.tensor([rows.slots[row] for row in rows.penalised])
        penalise(
            logits,
            torch.tensor(rows.penalised),
            table.token_counts.counts,
            table.token_counts.seen,
            table.count_row[slots],
            table.repetition_penalty[slots],
            table.presence_penalty[slots],
            table.frequency_penalty[slots],
        )
