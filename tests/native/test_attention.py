"""Native attention against float64 where it is delicate: what is merged, rescaled, capped or broken."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from surefoot.config.hardware import probe
from surefoot.kernels.prefill_attention import prefill_attention_reference
from surefoot.native import library
from surefoot.native.kernels import ROW, Attention, Kernels
from tests.native.conftest import OLDER


@dataclass(frozen=True)
class How:
    window: int = 0
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class Row:
    first: int  # token of the batch
    start: int
    count: int
    table: Tensor

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.count)


class Batch:
    """Rows over a cache of their own, whose pages are in random order."""

    def __init__(self, spans: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
        """spans: tokens in the cache and tokens computed, of each row."""
        torch.manual_seed(0)
        columns = [-(-(start + count) // page_size) for start, count in spans]
        tables = torch.randperm(sum(columns)).split_with_sizes(columns)
        firsts = accumulate((count for _, count in spans), initial=0)
        self.rows = [Row(*row) for row in zip(firsts, *zip(*spans, strict=True), tables, strict=False)]
        self.keys, self.values = torch.randn(2, sum(columns), page_size, kv_heads, head_dim)
        self.q = torch.randn(sum(count for _, count in spans), heads, head_dim)

    def attend(self, kernels: Kernels, how: How = How(), rows: list[Row] | None = None) -> Tensor:
        """For all tokens of the batch; those that are not of `rows` stay 7."""
        chosen = self.rows if rows is None else rows
        array = np.array([(row.first, row.count, row.start, row.table.data_ptr()) for row in chosen], ROW)
        out = torch.full_like(self.q, 7.0)
        tensors = (self.q, out, self.keys, self.values)
        _, heads, head_dim = self.q.shape
        _, page_size, kv_heads, _ = self.keys.shape
        sizes = (len(chosen), self.q.stride(0), heads, kv_heads, head_dim, page_size, how.window)
        pointers = (*(tensor.data_ptr() for tensor in tensors), array.ctypes.data)
        kernels.lib.attention(kernels.pool, Attention(*pointers, *sizes, how.scale, how.softcap))
        return out

    def reference(self, how: How = How()) -> Tensor:
        cache = (self.keys.double(), self.values.double())
        return torch.cat(
            [
                prefill_attention_reference(
                    self.q[row.tokens].double(), cache, row.table, row.start, how.window, how.scale, how.softcap
                )
                for row in self.rows
            ]
        )


def assert_near(out: Tensor, wanted: Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("group", [1, 2, 5, 6, 7, 16])
@pytest.mark.parametrize("head_dim, page_size", [(1, 1), (20, 5), (131, 128)])
def test_heads_that_share_keys(kernels: Kernels, group: int, head_dim: int, page_size: int) -> None:
    batch = Batch([(70, 1), (0, 1), (3, 2), (100, 40)], 2 * group, 2, head_dim, page_size)
    for window in (0, 1, 50):
        how = How(window, head_dim**-0.5)
        assert_near(batch.attend(kernels, how), batch.reference(how))


def test_long_and_short_rows_share_a_call(kernels: Kernels) -> None:
    """Rows are split in unlike numbers of parts, and not all are."""
    spans = [(9, 1), (6000, 1), (0, 1), (1300, 1), (577, 1), (3000, 3), (0, 2), (1000, 90), (0, 1)]
    batch = Batch(spans, 3, 1, 16, 16)
    for window in (0, 2000):
        assert_near(batch.attend(kernels, How(window, 0.25)), batch.reference(How(window, 0.25)))


@pytest.mark.parametrize("window", [0, 300])
def test_results_do_not_depend_on_the_rest_of_the_step(kernels: Kernels, window: int) -> None:
    """To the bit: alone or among others, and a prompt in one chunk or in several."""
    batch, how = Batch([(1500, 1), (40, 1), (700, 150), (9, 3)], 6, 2, 20, 16), How(window)
    together = batch.attend(kernels, how)
    for row in batch.rows:
        assert torch.equal(batch.attend(kernels, how, [row])[row.tokens], together[row.tokens])
    long = batch.rows[2]
    for done in range(0, long.count, 50):
        chunk = replace(long, first=long.first + done, start=long.start + done, count=50)
        assert torch.equal(batch.attend(kernels, how, [chunk])[chunk.tokens], together[chunk.tokens])


@pytest.mark.parametrize("rising", [True, False])
def test_scores_of_hundreds(kernels: Kernels, rising: bool) -> None:
    """Each block of keys has scores that dwarf those of others, so earlier sums or its own become nothing."""
    batch = Batch([(2000, 1), (300, 70)], 4, 2, 24, 8)
    for row in batch.rows:
        places = torch.arange(row.start + row.count)
        height = torch.linspace(0.1, 40, len(places))
        batch.keys[row.table[places // 8], places % 8] *= (height if rising else height.flip(0))[:, None, None]
    wanted = batch.reference()
    assert wanted.isfinite().all()
    assert_near(batch.attend(kernels), wanted, 2e-4)  # a score of hundreds is rounded by some 1e-5


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_capped_scores_of_all_sizes(kernels: Kernels, softcap: float) -> None:
    batch, how = Batch([(511, 1), (100, 33)], 6, 2, 20, 4), How(softcap=softcap)
    batch.keys *= 10.0 ** torch.randint(-4, 2, batch.keys.shape[:3])[..., None]
    assert_near(batch.attend(kernels, how), batch.reference(how), 2e-5)
    batch.keys.clamp_(-0.5, 0.5)
    assert_near(batch.attend(kernels, how), batch.reference(how))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("broken", [1, 3])
def test_nan_and_infinity_stay_in_their_row(kernels: Kernels, broken: int, bad: float) -> None:
    batch = Batch([(40, 1), (1400, 1), (90, 1), (10, 20), (64, 5)], 6, 2, 20, 4)
    healthy, q = batch.attend(kernels), batch.q
    row = batch.rows[broken]
    batch.q = q.clone()
    batch.q[row.first] *= bad
    out = batch.attend(kernels)
    assert out[row.first].isnan().all()
    assert torch.equal(out[: row.first], healthy[: row.first])
    assert torch.equal(out[row.first + 1 :], healthy[row.first + 1 :])
    batch.q = q
    batch.keys[row.table[0], 0] = bad
    out = batch.attend(kernels)
    assert out[row.tokens].isnan().all()
    assert torch.equal(out[: row.tokens.start], healthy[: row.tokens.start])
    assert torch.equal(out[row.tokens.stop :], healthy[row.tokens.stop :])


# ---- The exponential -------------------------------------------------------------------------------------------------

SHIM = """
#include "surefoot.h"
void exp_all(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i + LANES <= count; i += LANES) store(&y[i], exp_of(load(&x[i])));
}
"""


@pytest.mark.parametrize("target", ["native", *OLDER])
def test_exponential(target: str, tmp_path: Path) -> None:
    if target != "native" and platform.machine() != "x86_64":
        pytest.skip("not for this CPU")
    if target == "avx2" and "avx2" not in probe().cpu_features:
        pytest.skip("not for this CPU")
    flags = OLDER[target] if target in OLDER else library._target_flags()
    (tmp_path / "exp.c").write_text(SHIM)
    command = [*library._find(""), *flags, *library.FLAGS, f"-I{library.SOURCES}", "exp.c", "-o", "exp.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    exp_all = ctypes.CDLL(str(tmp_path / "exp.so")).exp_all

    def exp(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        y = np.full_like(x, 7)
        exp_all(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(x)))
        return y

    x = np.linspace(-87, 88, 1 << 20, dtype=np.float32)
    right = np.exp(x.astype(np.float64))
    assert (np.abs(exp(x) - right) / np.spacing(right.astype(np.float32))).max() < 2
    small = np.geomspace(1e-38, 1e-3, 1 << 16, dtype=np.float32)
    assert np.abs(exp(-small) - np.exp(-small.astype(np.float64))).max() < 1.2e-7
    ends = np.array([0, -0.0, -np.inf, np.inf, np.nan, -87.1, -1e4, -3e38, 88.1, 1e4, 3e38, -1e-45, 0, 0, 0, 0])
    expected = [1, 1, 0, np.inf, np.nan, 0, 0, 0, np.inf, np.inf, np.inf, 1, 1, 1, 1, 1]
    np.testing.assert_array_equal(exp(ends.astype(np.float32)), np.array(expected, np.float32))
