"""Normalisation with a learned scale."""

from __future__ import annotations

from torch import Tensor

from surefoot.kernels.rms_norm import head_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight  # [hidden]
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden]."""
        return rms_norm(x, self._weight, self._eps)


class HeadRMSNorm:
    """Each head on its own: queries and keys in one pass."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight  # [heads, head_dim]
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, head_dim]."""
        return head_rms_norm(x, self._weight, self._eps)
