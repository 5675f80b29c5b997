"""Root mean square normalisation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32, the product in x's dtype (Llama's rounding).

    x: [..., hidden], weight: any shape that broadcasts. Returns x's shape and dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for x: [tokens, hidden], weight: [hidden]; at a few rows less than half the time of the reference, since
    torch's matrix product takes the mean of a row faster than its reduction does."""
    wide = x.float()
    bias, mean = _averaging(eps, x.shape[-1], x.device)
    mean_square = torch.addmm(bias, wide.square(), mean)
    return (wide * mean_square.rsqrt_()).to(x.dtype).mul_(weight)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for each head, x: [tokens, heads, head_dim], weight: [heads, head_dim]."""
    wide = x.float()
    bias, mean = _averaging(eps, x.shape[-1], x.device)
    mean_square = torch.addmm(bias, wide.square().flatten(0, 1), mean).view(*x.shape[:2], 1)
    return (wide * mean_square.rsqrt_()).to(x.dtype).mul_(weight)


@functools.lru_cache(maxsize=16)
def _averaging(eps: float, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1] eps, and the [hidden, 1] matrix that takes a mean."""
    return torch.tensor([eps], device=device), torch.full((hidden, 1), 1 / hidden, device=device)
