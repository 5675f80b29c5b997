"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from surefoot.config.model_spec import Activation
from surefoot.kernels.gelu_tanh_mul import gelu_tanh_mul
from surefoot.kernels.silu_mul import silu_mul
from surefoot.layers.linear import Linear

ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class GatedMLP:
    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up  # rows of the gate, then of up
        self._down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)). x: [tokens, hidden]."""
        return self._down(self._activation(self._gate_up(x)))
