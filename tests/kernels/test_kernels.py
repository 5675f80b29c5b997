"""Every kernel against its definition: a table of shapes each, with an odd one."""

from __future__ import annotations

import importlib
import math
import pkgutil

import pytest
import torch

import surefoot.kernels
from surefoot.kernels.decode_attention import decode_attention, decode_attention_reference
from surefoot.kernels.gelu_tanh_mul import gelu_tanh_mul
from surefoot.kernels.kv_cache_write import kv_cache_write
from surefoot.kernels.packed_linear import FP16_MAX, pack_weight, packed_linear, packed_linear_reference
from surefoot.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from surefoot.kernels.rms_norm import head_rms_norm, rms_norm, rms_norm_reference
from surefoot.kernels.rotary import apply_rotary, rotary_tables
from surefoot.kernels.silu_mul import silu_mul

TESTED_HERE = {
    "decode_attention",
    "gelu_tanh_mul",
    "kv_cache_write",
    "packed_linear",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
}
TESTED_ELSEWHERE = {"logprobs", "penalties", "sampling"}  # in files of these names


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


@pytest.mark.parametrize("tokens, heads, head_dim", [(1, 12, 64), (5, 3, 10), (0, 2, 8)], ids=["one", "odd", "none"])
def test_head_rms_norm(tokens: int, heads: int, head_dim: int) -> None:
    """Of a part of each token's heads, as the queries and keys in qkv are."""
    x, weight = torch.randn(tokens, heads + 2, head_dim)[:, :heads], torch.rand(heads, head_dim)
    got = head_rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, rms_norm_reference(x, weight, 1e-6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens, size", [(1, 1536), (5, 13), (0, 8)], ids=["one", "odd", "none"])
def test_gated_activations(tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size)
    before = gate_up.clone()
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    silu = gate / (1 + torch.exp(-gate))
    gelu = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(silu_mul(gate_up).double(), silu * up, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gelu_tanh_mul(gate_up).double(), gelu * up, rtol=1e-6, atol=1e-6)
    assert torch.equal(gate_up, before), "the input is overwritten"


@pytest.mark.parametrize(
    "tokens, heads, head_dim, size, magnitude",
    [(1, 12, 64, 64, 1.0), (5, 3, 10, 10, 1.2), (7, 4, 16, 6, 0.7), (0, 2, 8, 8, 1.0)],
    ids=["one", "odd", "partial", "none"],
)
def test_rotary_turns_each_pair_by_its_angle(
    tokens: int, heads: int, head_dim: int, size: int, magnitude: float
) -> None:
    x = torch.randn(tokens, heads, head_dim)
    positions = torch.randint(0, 1000, (tokens,))
    frequencies = 10000.0 ** -(torch.arange(0, size, 2) / size)
    pairs = torch.complex(x[..., : size // 2].double(), x[..., size // 2 : size].double())
    angles = (positions[:, None].float() * frequencies).double()
    turned = pairs * torch.polar(torch.full_like(angles, magnitude), angles)[:, None]
    got = apply_rotary(x, *rotary_tables(positions, frequencies, magnitude))
    torch.testing.assert_close(got[..., :size].double(), torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-5)
    assert torch.equal(got[..., size:], x[..., size:])


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


HEADS = pytest.mark.parametrize(
    "heads, kv_heads, head_dim, page_size",
    [(9, 3, 64, 16), (4, 4, 32, 8), (5, 1, 10, 3)],
    ids=["gqa", "mha", "mqa-odd"],
)
WINDOWS = pytest.mark.parametrize("window", [0, 1, 5, 24, 1000])  # none, itself alone, within a page or two, more
SOFTCAPS = pytest.mark.parametrize("softcap", [0.0, 2.0])
SCALE = 0.3

Cache = tuple[torch.Tensor, torch.Tensor]  # keys, values


def filled_cache(page_size: int, kv_heads: int, head_dim: int, lengths: list[int]) -> tuple[Cache, torch.Tensor]:
    """Keys and values, and the page table of rows of these lengths. Pages that no row has are full of NaN, and places
    past a row's end of large numbers: either shows if it is read, or if it has weight."""
    columns = -(-max(lengths) // page_size)
    num_pages = len(lengths) * columns
    cache = (
        torch.full((num_pages + 1, page_size, kv_heads, head_dim), torch.nan),
        torch.full((num_pages + 1, page_size, kv_heads, head_dim), torch.nan),
    )
    pages = torch.randperm(num_pages).view(len(lengths), columns)
    for row, length in enumerate(lengths):
        used = pages[row, : -(-length // page_size)]
        for part in cache:
            part[used] = 1e4
            for place in range(length):
                part[pages[row, place // page_size], place % page_size] = torch.randn(kv_heads, head_dim)
    return cache, pages


@HEADS
@WINDOWS
@SOFTCAPS
@pytest.mark.parametrize("lengths", [[1], [17, 1, 40], [64, 63]], ids=["one", "ragged", "full-pages"])
def test_decode_attention(
    heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, softcap: float, lengths: list[int]
) -> None:
    """Each row gathers from the first column on that its window touches."""
    cache, pages = filled_cache(page_size, kv_heads, head_dim, lengths)
    q = torch.randn(len(lengths), heads, head_dim)
    first = [max(0, length - window) // page_size if window else 0 for length in lengths]
    columns = max(-(-length // page_size) - skip for length, skip in zip(lengths, first, strict=True))
    gathered = torch.empty(len(lengths), columns, dtype=torch.int64)
    mask = torch.full((len(lengths), 1, 1, columns * page_size), -torch.inf)
    for row, length in enumerate(lengths):
        for column in range(columns):
            inside = (first[row] + column) * page_size < length
            gathered[row, column] = pages[row, first[row] + column if inside else first[row]]
        seen = slice(max(0, length - window) if window else 0, length)
        mask[row, 0, 0, seen.start - first[row] * page_size : seen.stop - first[row] * page_size] = 0
    got = decode_attention(q, cache, gathered.flatten(), mask, SCALE, softcap)
    wanted = decode_attention_reference(q, cache, pages, torch.tensor(lengths), window, SCALE, softcap)
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)


@HEADS
@WINDOWS
@SOFTCAPS
@pytest.mark.parametrize(
    "start, tokens", [(0, 1), (0, 33), (31, 2), (16, 16), (40, 30)], ids=["one", "odd", "cached", "page", "crossing"]
)
def test_prefill_attention(
    heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, softcap: float, start: int, tokens: int
) -> None:
    cache, pages = filled_cache(page_size, kv_heads, head_dim, [start + tokens])
    q = torch.randn(tokens, heads, head_dim)
    skipped = max(0, start + 1 - window) // page_size if window else 0
    places = torch.arange(skipped * page_size, pages.shape[1] * page_size)
    positions = torch.arange(start, start + tokens)[:, None]
    seen = (places <= positions) & (places > positions - (window or start + tokens))
    mask = torch.where(seen, 0.0, -torch.inf)
    got = prefill_attention(q, cache, pages[0, skipped:], mask, SCALE, softcap)
    wanted = prefill_attention_reference(q, cache, pages[0], start, window, SCALE, softcap)
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)


def test_a_soft_cap_bounds_scores() -> None:
    """A key that would take all weight takes what the cap leaves it: scores of 100 and 0 become 2 and 0."""
    keys, values = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    keys[0, 0], values[0, 0] = 100.0, 1.0
    q, pages = torch.tensor([[[1.0, 0, 0, 0]]]), torch.tensor([0])
    wanted = torch.full((1, 1, 4), math.exp(2) / (math.exp(2) + 1))
    for got in (
        decode_attention(q, (keys, values), pages, torch.zeros(1, 1, 1, 2), 1.0, 2.0),
        prefill_attention(q, (keys, values), pages, torch.zeros(1, 2), 1.0, 2.0),
    ):
        torch.testing.assert_close(got, wanted)
