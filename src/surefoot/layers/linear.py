"""Matrix products. A `Linear` is made from a weight once, in the form that its kernel wants."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.config.engine_plan import LinearKernel
from surefoot.kernels.packed_linear import pack_weight, packed_linear


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]. Returns x W^T + bias: [rows, out] in x's dtype."""


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """fp16 weights, fp32 activations and bias, on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = pack_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out = packed_linear(x, self._packed)
        return out if self._bias is None else out.add_(self._bias)


class LinearScheme:
    """How all matrices of a model are held."""

    def __init__(self, kernel: LinearKernel, dtype: torch.dtype) -> None:
        self._kernel = kernel
        self._dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """weight: [out, in] fp32, bias: [out] fp32."""
        if self._kernel == "fp16_packed":
            return PackedLinear(weight, bias)
        return DenseLinear(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))

    def table(self, weight: Tensor) -> Tensor:
        """A weight that rows are looked up in, rounded as `linear` rounds it."""
        return weight.to(self._dtype)
