"""Rotary position embedding in the half-split form: element i is paired with element i + head_dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Factors for `apply_rotary`, shared by all layers of a step.

    positions: [tokens] int64, inverse_frequencies: [head_dim / 2] fp32. Returns (cos, signed_sin), each
    [tokens, 1, head_dim] fp32; the first half of signed_sin is negated.
    """
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i + d/2}) by its position's angle (RoFormer, arXiv 2104.09864).

    x: [tokens, heads, head_dim]. Returns the same shape; the product is computed in fp32.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, signed_sin).to(x.dtype)
