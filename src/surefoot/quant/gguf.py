"""GGUF's number formats, to float32. Bit-exact: products and sums are rounded as the format's definition says.

A quantised row is a sequence of blocks of 32 elements, each with its own scales:

    Q4_0  18 bytes: f16 d        | 16 bytes of nibbles   w = (q - 8) * d
    Q4_1  20 bytes: f16 d, f16 m | 16 bytes of nibbles   w = q * d + m
    Q8_0  34 bytes: f16 d        | 32 int8               w = q * d

Byte i of the nibbles holds element i in its low half and element i + 16 in its high half.

The arithmetic is numpy's, on one thread: it runs at the speed of memory, and never waits for a second core that
another process keeps busy.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from surefoot.checkpoint.gguf import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(raw: Bytes, type_: GGMLType, shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 tensor of `shape` that the bytes `raw` hold; a copy. Raises ValueError if the sizes do not fit."""
    num_blocks, rest = divmod(math.prod(shape), type_.block_elements)
    if rest or raw.nbytes != num_blocks * type_.block_bytes:
        raise ValueError(
            f"{raw.nbytes} bytes cannot be a {type_.name} tensor of shape {shape}: "
            f"it takes {type_.block_bytes} bytes for every {type_.block_elements} elements"
        )
    return torch.from_numpy(_floats(raw.reshape(num_blocks, type_.block_bytes), type_).reshape(shape))


def _floats(blocks: Bytes, type_: GGMLType) -> Floats:
    """[blocks, bytes of a block] -> [blocks, elements of a block]"""
    match type_:
        case GGMLType.F32:
            return blocks.view("<f4").astype(np.float32)
        case GGMLType.F16:
            return _half(blocks)
        case GGMLType.BF16:
            return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case GGMLType.Q4_0:
            values = _nibbles(blocks[:, 2:])
            values -= 8
            values *= _half(blocks[:, :2])
        case GGMLType.Q4_1:
            values = _nibbles(blocks[:, 4:])
            values *= _half(blocks[:, :2])
            values += _half(blocks[:, 2:4])
        case GGMLType.Q8_0:
            values = blocks[:, 2:].view(np.int8).astype(np.float32)
            values *= _half(blocks[:, :2])
    return values


def _half(columns: Bytes) -> Floats:
    """[blocks, 2] -> [blocks, 1]"""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, 16] -> [blocks, 32], values 0 to 15"""
    values = np.empty((len(packed), 32), np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values
