"""Both ends of a model: token ids to hidden states, hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.layers.linear import LinearScheme


class Embedding:
    def __init__(self, weight: Tensor, scheme: LinearScheme, dtype: torch.dtype, scale: float) -> None:
        self._table = scheme.table(weight)  # [vocab, hidden]
        self._dtype = dtype
        self._scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] int64. Returns [tokens, hidden]."""
        rows = self._table.index_select(0, token_ids).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale


class LMHead:
    def __init__(self, weight: Tensor, scheme: LinearScheme, softcap: float) -> None:
        self._linear = scheme.linear(weight)
        self._softcap = softcap  # 0: none

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden]. Returns fp32 logits [rows, vocab]."""
        logits = self._linear(hidden).float()
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits
