"""Dequantised weights are those of the `gguf` package, bit for bit."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from surefoot.checkpoint.gguf import GGMLType, GGUFFile
from surefoot.quant.gguf import SLAB_ELEMENTS, dequantize

ODD_SHAPES = [(32,), (1, 32), (1000, 64), (7, 96), (3, 5, 160)]
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
SCALE_OFFSETS = {  # of the 16-bit floats in a block
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}


def reference(raw: np.ndarray, type_: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    row_bytes = shape[-1] // type_.block_elements * type_.block_bytes
    return gguf.quants.dequantize(raw.reshape(*shape[:-1], row_bytes), Type(int(type_))).reshape(shape)


def assert_same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert np.array_equal(found.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("type_", [t for t in GGMLType if t.block_elements == 32 or t in FLOATS], ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_quantised_values(type_: GGMLType, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    raw = gguf.quants.quantize(values, Type(int(type_))).view(np.uint8).ravel()
    assert_same_bits(dequantize(raw, type_, shape), reference(raw, type_, shape))


@pytest.mark.parametrize("type_", SCALE_OFFSETS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 1237])
def test_any_bits(type_: GGMLType, rows: int) -> None:
    """Blocks no quantiser would make: every code, and scales of any sign and size, with denormals and zeros."""
    generator = np.random.default_rng(rows)
    raw = generator.integers(0, 256, (3 * rows, type_.block_bytes), np.uint8)
    for column in SCALE_OFFSETS[type_]:
        finite = generator.integers(0, 0x7C00, len(raw), np.uint16)
        finite[::7] = generator.integers(0, 0x0400, len(finite[::7]))  # denormals
        finite |= generator.integers(0, 2, len(raw), np.uint16) << 15
        raw[:, column : column + 2] = finite.astype("<u2").view(np.uint8).reshape(-1, 2)
    shape = (rows, 3 * type_.block_elements)
    expected = reference(raw.ravel(), type_, shape)
    assert np.isfinite(expected).all()
    assert_same_bits(dequantize(raw.ravel(), type_, shape), expected)


@pytest.mark.parametrize("type_", GGMLType, ids=str)
def test_intermediate_values_are_bounded(type_: GGMLType) -> None:
    """However large the tensor is: only the result grows."""
    num_blocks = 40 * SLAB_ELEMENTS // type_.block_elements
    raw = np.zeros(num_blocks * type_.block_bytes, np.uint8)
    tracemalloc.start()
    result = dequantize(raw, type_, (num_blocks, type_.block_elements))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < result.nbytes + 24 * SLAB_ELEMENTS


def test_every_format_is_tested() -> None:
    assert {*FLOATS, *SCALE_OFFSETS} == set(GGMLType)


def test_plain_floats_of_odd_sizes() -> None:
    values = np.random.default_rng(0).standard_normal((3, 7), np.float32)
    assert_same_bits(dequantize(values.view(np.uint8).ravel(), GGMLType.F32, (3, 7)), values)
    half = values.astype(np.float16)
    assert_same_bits(dequantize(half.view(np.uint8).ravel(), GGMLType.F16, (3, 7)), half)


def test_the_result_is_not_the_input() -> None:
    raw = np.ones(4, np.float32).view(np.uint8)
    result = dequantize(raw, GGMLType.F32, (4,))
    raw[:] = 0
    assert result.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(2, 32), (33,)])
def test_wrong_sizes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"34 bytes cannot be a Q8_0 tensor of shape .* takes 34 bytes for every 32"):
        dequantize(np.zeros(34, np.uint8), GGMLType.Q8_0, shape)


def test_the_default_model(default_model_path: Path) -> None:
    file = GGUFFile.open(default_model_path)
    weights = {name: dequantize(file.raw(name), t.type, t.shape) for name, t in file.tensors.items()}
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    for name in ("blk.0.attn_k.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        tensor = file.tensors[name]
        assert_same_bits(weights[name], reference(file.raw(name), tensor.type, tensor.shape))
