"""Rotary position embedding with its scalings: frequencies from a `Rope`, tables for a step from its positions."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from surefoot.config.model_spec import (
    DynamicRopeScaling,
    FactorsRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    Rope,
    YarnRopeScaling,
)
from surefoot.kernels.rotary import rotary_tables


class Rotary:
    """The rotation of all layers that have the same `Rope`."""

    def __init__(self, rope: Rope) -> None:
        self.inverse_frequencies = inverse_frequencies(rope)
        self.magnitude = 1.0
        if isinstance(rope.scaling, YarnRopeScaling | FactorsRopeScaling):
            self.magnitude = rope.scaling.attention_factor

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] int64. Returns what kernels.rotary.apply_rotary takes."""
        return rotary_tables(positions, self.inverse_frequencies, self.magnitude)


def inverse_frequencies(rope: Rope) -> Tensor:
    """theta^(-2i / size) for i in 0 .. size / 2 - 1, scaled as the checkpoint says. Returns fp32.

    ValueError for LongRoPE: its factors are chosen by model_spec.for_context.
    """
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case NoRopeScaling() | DynamicRopeScaling():
            return plain
        case LinearRopeScaling(factor):
            return plain / factor
        case FactorsRopeScaling(factors):
            return plain / torch.tensor(factors)
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(plain, scaling, rope)
        case LongRopeScaling():
            raise ValueError("LongRoPE's factors have not been chosen")
        case _:
            assert_never(rope.scaling)


def _llama3(plain: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Wavelengths above original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor
    are kept, and between the two the frequency is blended linearly in original / wavelength."""
    turns = scaling.original_max_context * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, scaling: YarnRopeScaling, rope: Rope) -> Tensor:
    """Frequencies that make beta_fast turns or more within the original context are kept, those below beta_slow are
    divided by `factor`, and between the two they are blended linearly in their index."""

    def index(turns: float) -> float:
        """Where the frequency would stand that makes so many turns."""
        return rope.size * math.log(scaling.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(rope.size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return stretched * plain / scaling.factor + (1 - stretched) * plain
