"""Every kernel against its definition: a table of shapes each, with an odd one."""

from __future__ import annotations

import importlib
import math
import pkgutil

import pytest
import torch

import surefoot.kernels
from surefoot.kernels.decode_attention import decode_attention, decode_attention_reference
from surefoot.kernels.kv_cache_write import kv_cache_write
from surefoot.kernels.packed_linear import FP16_MAX, pack_weight, packed_linear, packed_linear_reference
from surefoot.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from surefoot.kernels.rms_norm import rms_norm
from surefoot.kernels.rotary import apply_rotary, rotary_tables
from surefoot.kernels.silu_mul import silu_mul

TESTED_HERE = {
    "decode_attention",
    "kv_cache_write",
    "packed_linear",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
}
TESTED_ELSEWHERE = {"sampling"}  # test_sampling.py


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_every_kernel_is_tested() -> None:
    modules = {module.name for module in pkgutil.iter_modules(surefoot.kernels.__path__)}
    assert modules == TESTED_HERE | TESTED_ELSEWHERE
    for name in modules:
        assert importlib.import_module(f"surefoot.kernels.{name}").__doc__


@pytest.mark.parametrize("tokens, hidden", [(1, 576), (7, 33), (0, 64), (130, 576)], ids=["one", "odd", "none", "many"])
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
def test_rms_norm(tokens: int, hidden: int, dtype: torch.dtype, atol: float) -> None:
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.rand(hidden).to(dtype)
    wide = x.double()
    wanted = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("tokens, size", [(1, 1536), (5, 13), (0, 8)], ids=["one", "odd", "none"])
def test_silu_mul(tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size)
    before = gate_up.clone()
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + torch.exp(-gate)) * up, rtol=0, atol=1e-6)
    assert torch.equal(gate_up, before), "the input is overwritten"


@pytest.mark.parametrize("tokens, heads, head_dim", [(1, 12, 64), (5, 3, 10), (0, 2, 8)], ids=["one", "odd", "none"])
def test_rotary_turns_each_pair_by_its_angle(tokens: int, heads: int, head_dim: int) -> None:
    x = torch.randn(tokens, heads, head_dim)
    positions = torch.randint(0, 1000, (tokens,))
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    pairs = torch.complex(x[..., : head_dim // 2].double(), x[..., head_dim // 2 :].double())
    angles = (positions[:, None].float() * frequencies).double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    got = apply_rotary(x, *rotary_tables(positions, frequencies))
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows, size, out", [(1, 576, 960), (4, 576, 3072), (7, 33, 5), (65, 48, 301), (0, 8, 8)])
def test_packed_linear(rows: int, size: int, out: int) -> None:
    x, weight = torch.randn(rows, size), torch.randn(out, size) * 0.05
    got = packed_linear(x, pack_weight(weight))
    torch.testing.assert_close(got, packed_linear_reference(x, weight), rtol=0, atol=1e-5)


def test_a_weight_beyond_fp16_is_refused() -> None:
    """The kernel would clip it without a word."""
    with pytest.raises(ValueError, match=r"131072.*--weight-dtype float32"):
        pack_weight(torch.full((2, 2), 131072.0))
    with pytest.raises(ValueError, match="nan"):
        pack_weight(torch.full((2, 2), math.nan))
    pack_weight(torch.full((2, 2), FP16_MAX))


def test_kv_cache_write_touches_its_places_alone() -> None:
    cache = torch.full((5, 3, 2, 4), 7.0)
    new = torch.randn(4, 2, 4)
    kv_cache_write(cache, new, torch.tensor([14, 0, 7, 3]))
    flat = cache.view(15, 2, 4)
    assert torch.equal(flat[[14, 0, 7, 3]], new)
    untouched = [place for place in range(15) if place not in (14, 0, 7, 3)]
    assert bool((flat[untouched] == 7.0).all())


ATTENTION = [  # heads, kv heads, head dim, page size
    (9, 3, 64, 16),
    (4, 4, 32, 8),
    (5, 1, 10, 3),
]


def poisoned_cache(pages: int, page_size: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Large numbers everywhere: a place that should not be read shows."""
    return torch.full((pages, page_size, kv_heads, head_dim), 1e4), torch.full(
        (pages, page_size, kv_heads, head_dim), 1e4
    )


@pytest.mark.parametrize("heads, kv_heads, head_dim, page_size", ATTENTION, ids=["gqa", "mha", "odd"])
@pytest.mark.parametrize("lengths", [[1], [17, 1, 40], [64, 63]], ids=["one", "ragged", "full-pages"])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, page_size: int, lengths: list[int]) -> None:
    columns = -(-max(lengths) // page_size)
    keys, values = poisoned_cache(len(lengths) * columns + 3, page_size, kv_heads, head_dim)
    pages = torch.randperm(len(lengths) * columns + 3)[: len(lengths) * columns].view(len(lengths), columns)
    for row, length in enumerate(lengths):
        for place in range(length):
            keys[pages[row, place // page_size], place % page_size] = torch.randn(kv_heads, head_dim)
            values[pages[row, place // page_size], place % page_size] = torch.randn(kv_heads, head_dim)
    q = torch.randn(len(lengths), heads, head_dim)
    mask = torch.zeros(len(lengths), columns * page_size)
    mask.masked_fill_(torch.arange(columns * page_size) >= torch.tensor(lengths)[:, None], -torch.inf)
    got = decode_attention(q, keys, values, pages.flatten(), mask[:, None, None, :])
    wanted = decode_attention_reference(q, keys, values, pages, torch.tensor(lengths))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads, kv_heads, head_dim, page_size", ATTENTION, ids=["gqa", "mha", "odd"])
@pytest.mark.parametrize("start, tokens", [(0, 1), (0, 33), (31, 2), (16, 16)], ids=["one", "odd", "cached", "page"])
def test_prefill_attention(heads: int, kv_heads: int, head_dim: int, page_size: int, start: int, tokens: int) -> None:
    columns = -(-(start + tokens) // page_size)
    keys, values = poisoned_cache(columns + 3, page_size, kv_heads, head_dim)
    pages = torch.randperm(columns + 3)[:columns]
    for place in range(start + tokens):
        keys[pages[place // page_size], place % page_size] = torch.randn(kv_heads, head_dim)
        values[pages[place // page_size], place % page_size] = torch.randn(kv_heads, head_dim)
    q = torch.randn(tokens, heads, head_dim)
    mask = torch.zeros(tokens, columns * page_size)
    mask.masked_fill_(torch.arange(columns * page_size) > (start + torch.arange(tokens))[:, None], -torch.inf)
    got = prefill_attention(q, keys, values, pages, mask)
    wanted = prefill_attention_reference(q, keys, values, pages, start)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
