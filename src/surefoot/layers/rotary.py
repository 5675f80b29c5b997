"""The frequencies of rotary position embedding, with their scalings."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from surefoot.config.model_spec import (
    FactorsRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelSpec,
    NoRopeScaling,
)


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """theta^(-2i / head_dim) for i in 0 .. head_dim / 2 - 1, scaled as the checkpoint says. Returns fp32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    match spec.rope_scaling:
        case NoRopeScaling():
            return plain
        case LinearRopeScaling(factor):
            return plain / factor
        case FactorsRopeScaling(factors):
            return plain / torch.tensor(factors)
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)
        case _:
            assert_never(spec.rope_scaling)


def _llama3(plain: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Wavelengths above original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor
    are kept, and between the two the frequency is blended linearly in original / wavelength."""
    turns = scaling.original_max_context * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain
