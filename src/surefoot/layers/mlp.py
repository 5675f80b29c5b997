"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from surefoot.kernels.silu_mul import silu_mul
from surefoot.layers.linear import Linear


class GatedMLP:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up  # rows of the gate, then of up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)). x: [tokens, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))
