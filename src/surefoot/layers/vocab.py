"""Both ends of a model: token ids to hidden states, hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.layers.linear import LinearScheme


class Embedding:
    def __init__(self, weight: Tensor, scheme: LinearScheme, dtype: torch.dtype) -> None:
        self._table = scheme.table(weight)  # [vocab, hidden]
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] int64. Returns [tokens, hidden]."""
        return self._table.index_select(0, token_ids).to(self._dtype)


class LMHead:
    def __init__(self, weight: Tensor, scheme: LinearScheme) -> None:
        self._linear = scheme.linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden]. Returns fp32 logits [rows, vocab]."""
        return self._linear(hidden).float()
