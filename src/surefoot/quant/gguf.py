"""GGUF's number formats, to float32. Bit-exact: products and sums are rounded as the format's definition says.

A quantised row is a sequence of blocks. A block of 32 elements has its own scales, 16-bit floats:

    Q4_0   d        | 16 bytes of nibbles                        w = (q - 8) * d
    Q4_1   d, m     | 16 bytes of nibbles                        w = q * d + m
    Q5_0   d        | 4 bytes of fifth bits | 16 of nibbles      w = (q - 16) * d
    Q5_1   d, m     | 4 bytes of fifth bits | 16 of nibbles      w = q * d + m
    Q8_0   d        | 32 int8                                    w = q * d

Byte i of the nibbles holds element i in its low half and element i + 16 in its high half; bit i of the fifth bits
belongs to element i. A block of 256 elements (the K formats) scales its sub-blocks by small integers:

    Q2_K   16 bytes: scale s, min m of 16 elements | 64 of 2-bit q | d, dmin            w = (d * s) * q - dmin * m
    Q3_K   32 bytes of third bits | 64 of 2-bit q | 12 of 6-bit scales s | d            w = (d * s) * (q - 4)
    Q4_K   d, dmin | 12 bytes: 6-bit scales s, mins m of 32 elements | 128 of nibbles   w = (d * s) * q - dmin * m
    Q5_K   d, dmin | 12 bytes as in Q4_K | 32 of fifth bits | 128 of nibbles            w = (d * s) * q - dmin * m
    Q6_K   128 bytes of nibbles | 64 of bits five and six | 16 int8 scales s | d        w = (d * s) * (q - 32)

Their bits lie in planes: a run of bytes holds the same bits of all elements of one sub-block, then the next higher
bits of the same bytes those of the next sub-block.

The arithmetic is numpy's, on one thread: it runs at the speed of memory, and never waits for a second core that
another process keeps busy. It takes a slab of blocks at a time, so that its intermediate values stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefoot.checkpoint.gguf import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SLAB_ELEMENTS = 1 << 17  # half a megabyte of results


def dequantize(raw: Bytes, type_: GGMLType, shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 tensor of `shape` that the bytes `raw` hold; a copy. Raises ValueError if the sizes do not fit."""
    num_blocks, rest = divmod(math.prod(shape), type_.block_elements)
    if rest or raw.nbytes != num_blocks * type_.block_bytes:
        raise ValueError(
            f"{raw.nbytes} bytes cannot be a {type_.name} tensor of shape {shape}: "
            f"it takes {type_.block_bytes} bytes for every {type_.block_elements} elements"
        )
    blocks = raw.reshape(num_blocks, type_.block_bytes)
    values = np.empty(shape, np.float32)
    by_block = values.reshape(num_blocks, type_.block_elements)
    slab = SLAB_ELEMENTS // type_.block_elements
    for start in range(0, num_blocks, slab):
        some = blocks[start : start + slab]
        by_block[start : start + slab] = _DECODERS[type_](some).reshape(len(some), -1)
    return torch.from_numpy(values)


def q4_1_of_q4_0(rows: Bytes) -> Bytes:
    """The same numbers in Q4_1: (q - 8) * d = q * d + m with m = -8 d, which a 16-bit float holds exactly.

    rows: [out, bytes of a row].
    """
    blocks = rows.reshape(-1, GGMLType.Q4_0.block_bytes)
    d = np.ascontiguousarray(blocks[:, :2])
    m = (d.view("<f2") * np.float16(-8)).view(np.uint8)
    return np.concatenate((d, m, blocks[:, 2:]), axis=1).reshape(len(rows), -1)


# ---- Plain floats ----------------------------------------------------------------------------------------------------


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _half(columns: Bytes) -> Floats:
    """[blocks, 2n] -> [blocks, n]"""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


# ---- Blocks of 32 ----------------------------------------------------------------------------------------------------


def _q4_0(blocks: Bytes) -> Floats:
    q = _planes(blocks[:, 2:], 4, 16)
    return (q.astype(np.float32) - 8) * _half(blocks[:, :2])


def _q4_1(blocks: Bytes) -> Floats:
    return _planes(blocks[:, 4:], 4, 16) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    q = _planes(blocks[:, 6:], 4, 16) | _bits(blocks[:, 2:6]) << 4
    return (q.astype(np.float32) - 16) * _half(blocks[:, :2])


def _q5_1(blocks: Bytes) -> Floats:
    q = _planes(blocks[:, 8:], 4, 16) | _bits(blocks[:, 4:8]) << 4
    return q * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8) * _half(blocks[:, :2])


def _bits(packed: Bytes) -> Bytes:
    """[blocks, n] -> [blocks, 8n], values 0 and 1"""
    return np.unpackbits(packed, axis=1, bitorder="little")


# ---- Blocks of 256 ---------------------------------------------------------------------------------------------------


def _q2_k(blocks: Bytes) -> Floats:
    scales, q, d, dmin = np.split(blocks, (16, 80, 82), axis=1)
    return _times(_planes(q, 2, 32), _half(d) * (scales & 15)) - (_half(dmin) * (scales >> 4))[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    third_bits, low, packed, d = np.split(blocks, (32, 96, 108), axis=1)
    # Bytes 0 to 7 hold the low four bits, bytes 8 to 11 the upper two.
    scales = (_planes(packed[:, :8], 4, 8) | _planes(packed[:, 8:], 2, 4) << 4).astype(np.float32) - 32
    q = (_planes(low, 2, 32) | _planes(third_bits, 1, 32) << 2).astype(np.float32) - 4
    return _times(q, _half(d) * scales)


def _q4_k(blocks: Bytes) -> Floats:
    d, dmin, packed, q = np.split(blocks, (2, 4, 16), axis=1)
    scales, mins = _scales_and_mins(packed)
    return _times(_planes(q, 4, 32), _half(d) * scales) - (_half(dmin) * mins)[:, :, None]


def _q5_k(blocks: Bytes) -> Floats:
    d, dmin, packed, fifth_bits, low = np.split(blocks, (2, 4, 16, 48), axis=1)
    scales, mins = _scales_and_mins(packed)
    q = _planes(low, 4, 32) | _planes(fifth_bits, 1, 32) << 4
    return _times(q, _half(d) * scales) - (_half(dmin) * mins)[:, :, None]


def _q6_k(blocks: Bytes) -> Floats:
    low, high, scales, d = np.split(blocks, (128, 192, 208), axis=1)
    q = (_planes(low, 4, 64) | _planes(high, 2, 32) << 4).astype(np.float32) - 32
    return _times(q, _half(d) * scales.view(np.int8))


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[blocks, 12] -> 2 x [blocks, 8], values 0 to 63.

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 mins 0 to 3; bytes 8 to 11 the low four bits of scales (low half) and
    mins (high half) 4 to 7, whose upper two bits are the upper two of bytes 0 to 3 and 4 to 7.
    """
    first, second, low = np.split(packed, 3, axis=1)
    scales = np.concatenate((first & 63, low & 15 | first >> 6 << 4), axis=1)
    mins = np.concatenate((second & 63, low >> 4 | second >> 6 << 4), axis=1)
    return scales, mins


def _times(q: npt.NDArray[Any], scales: Floats) -> Floats:
    """q [blocks, 256], scales [blocks, sub-blocks] -> [blocks, sub-blocks, elements]"""
    return q.reshape(*scales.shape, -1) * scales[:, :, None]


def _planes(packed: Bytes, bits: int, width: int) -> Bytes:
    """[blocks, n] -> [blocks, 8n / bits]: of each run of `width` bytes, first all lowest bits, then the next ones."""
    runs = packed.reshape(len(packed), -1, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


# [blocks, bytes of a block] -> [blocks, elements of a block], the latter in one dimension or two
_DECODERS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _half,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
