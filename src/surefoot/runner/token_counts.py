"""The pool of token counts: one row for each running request with penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenCounts:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_rows, vocab_size)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # how often a token stands in the output
        self.seen = torch.zeros(shape, dtype=torch.bool, device=device)  # whether it stands in prompt or output

    def rewrite(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """For a new owner: nothing of the last one is left, however its last step ended."""
        output_ids = torch.tensor(output, dtype=torch.int64)
        self.counts[row] = output_ids.bincount(minlength=self.counts.shape[-1])
        self.seen[row] = self.counts[row] > 0
        self.seen[row, torch.tensor(prompt, dtype=torch.int64)] = True

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """rows: [n] int64, each once; tokens: [n] int64, the next one of each row's output."""
        self.counts[rows, tokens] += 1
        self.seen[rows, tokens] = True
