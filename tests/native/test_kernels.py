"""Each native kernel against its torch reference or float64, at odd shapes."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.checkpoint.gguf import GGMLType
from surefoot.kernels.gelu_tanh_mul import gelu_tanh_mul
from surefoot.kernels.prefill_attention import prefill_attention_reference
from surefoot.kernels.rms_norm import rms_norm_reference
from surefoot.kernels.rotary import apply_rotary, rotary_tables
from surefoot.kernels.sampling import greedy
from surefoot.kernels.silu_mul import silu_mul
from surefoot.native.kernels import ROW, Attention, Kernels, KVWrite, PackedWeight, Rope, WeightFormat
from surefoot.quant.gguf import dequantize, q4_1_of_q4_0

FORMATS: tuple[WeightFormat, ...] = ("w4", "w8", "w16", "w32")
ROWS = (1, 2, 3, 4, 5, 7, 13, 16, 17, 33, 150)  # each way that a product is computed, and its edges
SHAPES = ((1, 32), (33, 64), (100, 2112), (96, 576))  # outputs, inputs
ODD_INPUTS = ((50, 47), (7, 3), (130, 1030))  # of formats without blocks
# Relative to the largest result: sums of fp32 in another order than float64's.
TOLERANCE = 3e-6


def blocks(rng: np.random.Generator, type_: GGMLType, outputs: int, inputs: int) -> np.ndarray[Any, Any]:
    """Random quantised rows with scales of all sizes."""
    count = outputs * inputs // 32
    raw = rng.integers(0, 256, (count, type_.block_bytes), dtype=np.uint8)
    halves = (rng.standard_normal((count, 2)) * 10.0 ** rng.integers(-4, 1, (count, 1))).astype(np.float16)
    scale_bytes = 4 if type_ is GGMLType.Q4_1 else 2
    raw[:, :scale_bytes] = halves.view(np.uint8)[:, :scale_bytes]
    return raw.reshape(outputs, -1)


def weight(kernels: Kernels, format: WeightFormat, outputs: int, inputs: int) -> tuple[PackedWeight, Tensor]:
    """Packed, and what it stands for, [outputs, inputs]."""
    rng = np.random.default_rng(outputs * inputs)
    if format in ("w16", "w32"):
        plain = rng.standard_normal((outputs, inputs)).astype(np.float16 if format == "w16" else np.float32)
        return kernels.pack(format, plain, inputs), torch.from_numpy(plain).double()
    type_ = GGMLType.Q4_1 if format == "w4" else GGMLType.Q8_0
    raw = blocks(rng, type_, outputs, inputs)
    return kernels.pack(format, raw, inputs), dequantize(raw, type_, (outputs, inputs)).double()


def product(kernels: Kernels, packed: PackedWeight, x: Tensor, y: Tensor, add: bool) -> None:
    kernels.lib.linear(kernels.pool, packed.struct, x.data_ptr(), len(x), y.data_ptr(), int(add))


@pytest.mark.parametrize(
    "format, shape",
    [*itertools.product(FORMATS, SHAPES), *itertools.product(("w16", "w32"), ODD_INPUTS)],
)
def test_products(kernels: Kernels, format: WeightFormat, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    packed, matrix = weight(kernels, format, outputs, inputs)
    torch.manual_seed(0)
    bias = torch.randn(outputs)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        wanted = x.double() @ matrix.T
        packed.struct.bias = None
        y = torch.full((rows, outputs), torch.nan)
        product(kernels, packed, x, y, add=False)
        size = (x.abs().double() @ matrix.abs().T).max()
        assert float((y - wanted).abs().max() / size) < TOLERANCE
        packed.struct.bias = bias.data_ptr()
        product(kernels, packed, x, y, add=True)
        assert float((y - (2 * wanted + bias)).abs().max() / size) < TOLERANCE


def test_a_broken_row_breaks_no_other(kernels: Kernels) -> None:
    for format in FORMATS:
        packed, matrix = weight(kernels, format, 64, 64)
        for rows in ROWS[1:]:
            x = torch.ones(rows, 64)
            x[1, 3], x[rows // 2, 5] = torch.nan, torch.inf
            y = torch.empty(rows, 64)
            product(kernels, packed, x, y, add=False)
            for row in range(rows):
                if row in (1, rows // 2):
                    assert not y[row].isfinite().all()
                else:
                    torch.testing.assert_close(y[row].double(), matrix.sum(-1), rtol=1e-4, atol=1e-4)


def test_single_rows_are_exact(kernels: Kernels) -> None:
    for format in FORMATS:
        packed, matrix = weight(kernels, format, 100, 96)
        out = torch.empty(96)
        for row in (0, 31, 99):
            kernels.lib.linear_row(packed.struct, row, out.data_ptr())
            assert torch.equal(out, matrix[row].float())


def test_q4_0_is_a_case_of_q4_1() -> None:
    raw = blocks(np.random.default_rng(0), GGMLType.Q4_0, 40, 96)
    assert torch.equal(dequantize(q4_1_of_q4_0(raw), GGMLType.Q4_1, (40, 96)), dequantize(raw, GGMLType.Q4_0, (40, 96)))


# ---- Attention -------------------------------------------------------------------------------------------------------

BATCHES = [  # of (tokens in the cache, tokens computed); decode rows first
    [(0, 1)],
    [(191, 1)],
    [(5, 1), (700, 1), (63, 1), (64, 1)],
    [(2500, 1)],  # split among tasks
    [(0, 5)],
    [(0, 65), (100, 33)],
    [(3, 1), (77, 1), (0, 17), (200, 130)],
]
HEADS = [(9, 3, 64, 16), (4, 4, 7, 3), (16, 2, 96, 16), (5, 5, 33, 1)]  # heads, KV heads, head_dim, page_size


@pytest.mark.parametrize("heads, kv_heads, head_dim, page_size", HEADS)
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (37, 0.0), (0, 5.0)], ids=["whole", "window", "softcap"])
def test_attention(
    kernels: Kernels, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, softcap: float
) -> None:
    """Places that no token sees hold NaN, and the pages before a window are none at all."""
    torch.manual_seed(0)
    scale = head_dim**-0.5
    for batch in BATCHES:
        num_pages = sum(-(-(start + count) // page_size) for start, count in batch)
        keys, values = (torch.full((num_pages, page_size, kv_heads, head_dim), torch.nan) for _ in range(2))
        free = torch.randperm(num_pages)
        q = torch.randn(sum(count for _, count in batch), heads + 2, head_dim)
        rows = np.empty(len(batch), ROW)
        tables = []
        first = 0
        for at, (start, count) in enumerate(batch):
            columns = -(-(start + count) // page_size)
            table, free = free[:columns].clone(), free[columns:]
            lowest = max(0, start - window + 1) if window else 0
            places = torch.arange(lowest, start + count)
            keys[table[places // page_size], places % page_size] = torch.randn(len(places), kv_heads, head_dim)
            values[table[places // page_size], places % page_size] = torch.randn(len(places), kv_heads, head_dim)
            given = table.clone()
            given[: lowest // page_size] = 1 << 40
            tables.append((table, given))
            rows[at] = (first, count, start, given.data_ptr())
            first += count
        out = torch.full((len(q), heads, head_dim), 7.0)
        how = Attention(
            *(tensor.data_ptr() for tensor in (q, out, keys, values)),
            rows.ctypes.data,
            len(batch),
            q.stride(0),
            heads,
            kv_heads,
            head_dim,
            page_size,
            window,
            scale,
            softcap,
        )
        kernels.lib.attention(kernels.pool, how)
        first = 0
        for (start, count), (table, _) in zip(batch, tables, strict=True):
            some = slice(first, first + count)
            wanted = prefill_attention_reference(q[some, :heads], (keys, values), table, start, window, scale, softcap)
            torch.testing.assert_close(out[some], wanted, rtol=0, atol=5e-6)
            first += count


# ---- Between the products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, size", [(1, 576), (3, 33), (50, 1537), (2, 1)])
def test_norms_activations_and_caps(kernels: Kernels, rows: int, size: int) -> None:
    torch.manual_seed(rows)
    x, scales, gate_up = torch.randn(rows, size) * 3, torch.randn(size), torch.randn(rows, 2 * size) * 8
    y = torch.empty(rows, size)
    kernels.lib.rms_norm(kernels.pool, x.data_ptr(), rows, size, scales.data_ptr(), 1e-5, y.data_ptr())
    torch.testing.assert_close(y, rms_norm_reference(x, scales, 1e-5), rtol=2e-6, atol=1e-6)
    for number, reference in enumerate((silu_mul, gelu_tanh_mul)):
        kernels.lib.activation_mul(kernels.pool, gate_up.data_ptr(), rows, size, number, y.data_ptr())
        torch.testing.assert_close(y, reference(gate_up), rtol=3e-6, atol=1e-5)
    kernels.lib.add(kernels.pool, y.data_ptr(), x.data_ptr(), rows * size)
    torch.testing.assert_close(y, gelu_tanh_mul(gate_up) + x, rtol=3e-6, atol=1e-5)
    capped = x.clone()
    kernels.lib.soft_cap(kernels.pool, capped.data_ptr(), rows * size, 2.5)
    torch.testing.assert_close(capped, 2.5 * torch.tanh(x / 2.5), rtol=1e-6, atol=1e-6)


def test_activations_of_extremes(kernels: Kernels) -> None:
    """What the vector exponential does at its ends: no NaN but of NaN."""
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, 0.0, 87.0, 200.0, 1e30] * 4)
    gate_up, y = torch.cat((gate, torch.ones_like(gate))), torch.empty(1, len(gate))
    kernels.lib.activation_mul(kernels.pool, gate_up.data_ptr(), 1, len(gate), 0, y.data_ptr())
    torch.testing.assert_close(y[0], torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("rotated, norm", [(64, False), (20, True), (14, False)])
def test_rotation_and_writing(kernels: Kernels, rotated: int, norm: bool) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim, page_size, num_pages = 37, 6, 2, 64, 16, 5
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    scales = torch.randn(heads + kv_heads, head_dim)
    positions = torch.randint(0, 9000, (tokens,))
    places = torch.randperm(num_pages * page_size)[:tokens]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, rotated, 2) / rotated)
    keys, values = (torch.zeros(num_pages, page_size, kv_heads, head_dim) for _ in range(2))
    tables = torch.empty(tokens, rotated)
    rope = Rope(frequencies.data_ptr(), rotated, 1.25)
    qk, v = qkv[:, : heads + kv_heads].clone(), qkv[:, heads + kv_heads :].clone()
    kernels.lib.rope_tables(kernels.pool, rope, positions.data_ptr(), tokens, tables.data_ptr())
    write = KVWrite(
        qkv.data_ptr(),
        scales.data_ptr() if norm else None,
        tables.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        places.data_ptr(),
        tokens,
        heads,
        kv_heads,
        head_dim,
        rotated,
        1e-6,
    )
    kernels.lib.rotate_and_write(kernels.pool, write)
    if norm:
        qk = torch.stack([rms_norm_reference(qk[:, h], scales[h], 1e-6) for h in range(heads + kv_heads)], 1)
    wanted = apply_rotary(qk, *rotary_tables(positions, frequencies, 1.25))
    torch.testing.assert_close(qkv[:, : heads + kv_heads], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys.view(-1, kv_heads, head_dim)[places], wanted[:, heads:], rtol=1e-5, atol=1e-5)
    assert torch.equal(values.view(-1, kv_heads, head_dim)[places], v)
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool)
    untouched[places] = False
    assert not keys.view(-1, kv_heads, head_dim)[untouched].any()


@pytest.mark.parametrize("vocab", [1, 31, 301, 4099])
def test_greedy_draws(kernels: Kernels, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randint(-50, 50, (40, vocab)).float()  # many ties: the first one counts
    logits[3, vocab // 2] = torch.nan
    logits[4, vocab - 1] = torch.inf
    logits[5, 0] = -torch.inf
    ids, finite = torch.empty(40, dtype=torch.int64), torch.empty(40, dtype=torch.bool)
    kernels.lib.greedy(kernels.pool, logits.data_ptr(), 40, vocab, ids.data_ptr(), finite.data_ptr())
    wanted_ids, wanted_finite = greedy(logits)
    assert torch.equal(finite, wanted_finite)
    assert torch.equal(ids[finite], wanted_ids[finite])
    assert all(logits[row, ids[row]] == logits[row].max() for row in range(40) if finite[row])


# ---- Threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_loops_run_each_task_once(kernels: Kernels, threads: int) -> None:
    """Many short loops, some of them after the threads have gone to sleep."""
    lib = kernels.lib
    pool = lib.pool_create(threads)
    x, y = torch.ones(9, 4096), torch.zeros(9, 4096)
    for loop in range(3000):
        lib.add(pool, y.data_ptr(), x.data_ptr(), y.numel())
        if loop % 1000 == 0:
            ctypes.CDLL(None).usleep(2000)
    lib.pool_destroy(pool)
    assert torch.equal(y, torch.full_like(y, 3000.0))
