"""Logarithms of probabilities: of given tokens, and of the most probable ones."""

from __future__ import annotations

import torch
from torch import Tensor

# The passes over so many rows stay within a CPU core's cache.
ROWS_AT_ONCE = 8


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax(logits) at each row's token and at its `count` most probable ones, best first. Of equal logits the
    smaller token id comes first, so that the order does not depend on the batch.

    logits: [rows, vocab] fp32, at least one row; tokens: [rows] int64; count >= 0, cut to the vocabulary. Returns
    [rows] fp32, ids [rows, count] int64, and [rows, count] fp32.
    """
    parts = []
    for first in range(0, len(logits), ROWS_AT_ONCE):
        part = logits[first : first + ROWS_AT_ONCE]
        ids = _most_probable(part, min(count, part.shape[-1]))
        wanted = torch.cat((tokens[first : first + ROWS_AT_ONCE, None], ids), dim=-1)
        parts.append((ids, part.log_softmax(-1).gather(-1, wanted)))
    top_ids, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs[:, 0], top_ids, logprobs[:, 1:]


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """torch.topk breaks ties at will. One token more than wanted shows whether a tie crosses the edge: such a row is
    sorted whole."""
    vocab_size = logits.shape[-1]
    values, ids = logits.topk(min(count + 1, vocab_size))
    ids, by_id = ids.sort()
    values, by_value = values.gather(-1, by_id).sort(descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    if 0 < count < vocab_size:
        for row in (values[:, count - 1] == values[:, count]).nonzero().flatten().tolist():
            ids[row] = logits[row].sort(descending=True, stable=True).indices[: count + 1]
    return ids[:, :count]
