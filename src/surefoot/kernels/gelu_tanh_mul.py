"""The gated activation of Gemma's MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (arXiv 1606.08415).

    gate_up: [tokens, 2 * size], the gate in the first half. Returns [tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
