"""The gated activation between the matrices of an MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    gate_up: [tokens, 2 * size], the gate in the first half. Returns [tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
