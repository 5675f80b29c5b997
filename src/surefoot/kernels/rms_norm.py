"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32, the product in x's dtype (Llama's rounding).

    x: [tokens, hidden], weight: [hidden]. Returns [tokens, hidden] in x's dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight
