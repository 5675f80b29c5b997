"""Draws the next token of every sampling row of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.config.paths import SamplerKind
from surefoot.kernels.sampling import draw, truncate
from surefoot.protocol.step_plan import StepPlan
from surefoot.runner.request_table import RequestTable


class SamplingRows:
    """The sampling rows of one step: decode rows, then the prefill rows with `samples`."""

    def __init__(self, plan: StepPlan, table: RequestTable) -> None:
        sampling_prefill = [row for row in plan.prefill if row.samples]
        self.slots = (*plan.decode_slots, *(row.slot for row in sampling_prefill))
        # The position of the token to draw: the number of tokens before it.
        self.positions = (
            *(start + 1 for start in plan.decode_starts),
            *(row.start + len(row.token_ids) for row in sampling_prefill),
        )
        owners = [table.owners[slot] for slot in self.slots]
        self.banned = tuple(
            owner.stop_ids if position < owner.min_tokens else ()
            for owner, position in zip(owners, self.positions, strict=True)
        )
        self.greedy = all(owner.sampling.greedy for owner in owners)
        if not owners:
            self.kind = SamplerKind.NONE
        elif any(self.banned) or any(owner.sampling.truncates for owner in owners):
            self.kind = SamplerKind.FULL
        else:
            self.kind = SamplerKind.GREEDY if self.greedy else SamplerKind.PLAIN


def sample(logits: Tensor, rows: SamplingRows, table: RequestTable) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] fp32, overwritten. Returns token ids [rows] int64, and [rows] bool: all logits finite."""
    if rows.kind is SamplerKind.NONE:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    finite = logits.sum(-1).isfinite()  # a sum is finite if all its terms are, and the fastest look at all of them
    for row, banned in enumerate(rows.banned):
        if banned:
            logits[row, list(banned)] = -torch.inf
    if rows.greedy:
        return logits.argmax(-1), finite
    slots = torch.tensor(rows.slots)
    temperatures = table.temperature[slots]
    logits /= temperatures.masked_fill(temperatures == 0, 1)[:, None]
    if rows.kind is SamplerKind.FULL:
        logits = truncate(logits, table.top_k[slots], table.top_p[slots], table.min_p[slots])
    return draw(logits, temperatures, table.seed[slots], torch.tensor(rows.positions)), finite
