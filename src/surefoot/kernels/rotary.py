"""Rotary position embedding in the half-split form: element i is paired with element i + size / 2, where `size` is the
rotated part of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Factors for `apply_rotary`, shared by all layers of a step.

    positions: [tokens] int64, inverse_frequencies: [size / 2] fp32. Returns (cos, signed_sin), each [tokens, 1, size]
    fp32 and times `magnitude`; the first half of signed_sin is negated.
    """
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i + size/2}) by its position's angle (RoFormer, arXiv 2104.09864).

    x: [tokens, heads, head_dim], of which the elements from `size` on pass through. Returns the same shape; the
    product is computed in fp32.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :size], cos, signed_sin), x[..., size:]), -1)
    swapped = x.roll(size // 2, -1)
    return torch.addcmul(x * cos, swapped, signed_sin).to(x.dtype)
