"""Matrix product with fp16 weights packed for the CPU, fp32 activations and fp32 accumulation.

On x86 with AVX2 and F16C, half the bytes of fp32 weights are read and no activation is rounded: against fp32 weights
it is several times faster at a few rows and still ahead at hundreds (docs/performance.md).
"""

from __future__ import annotations

from typing import NewType

import torch
import torch.nn.functional as F
from torch import Tensor

PackedWeight = NewType("PackedWeight", object)

FP16_MAX = 65504.0


def packed_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x @ w^T with w rounded to fp16. x: [rows, in] fp32, weight: [out, in]. Returns [rows, out] fp32."""
    return F.linear(x, weight.half().float())


def pack_weight(weight: Tensor) -> PackedWeight:
    """weight: [out, in] fp32. ValueError if this torch lacks the kernel, or an element does not fit fp16."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ValueError("this build of torch has no FBGEMM: use --weight-dtype float32")
    largest = float(weight.abs().max())
    if not largest <= FP16_MAX:
        raise ValueError(f"a weight of magnitude {largest} does not fit fp16: use --weight-dtype float32")
    return PackedWeight(torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None))


def packed_linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """x: [rows, in] fp32 contiguous. Returns [rows, out] fp32."""
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return out
