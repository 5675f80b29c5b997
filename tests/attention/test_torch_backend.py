"""The torch backend against the kernels' references: rows of any kind, in KV groups with and without a window."""

from __future__ import annotations

import pytest
import torch

from surefoot.attention import torch_backend
from surefoot.attention.forward_inputs import AttentionSpec, PrefillSpan, Rows
from surefoot.attention.kv_cache import KVPages
from surefoot.attention.torch_backend import TorchBackend
from surefoot.config.bounds import KVGroup
from surefoot.kernels.prefill_attention import prefill_attention_reference

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SLOTS, COLUMNS = 5, 12
DECODE = {3: 41, 0: 1, 4: 30}  # slot -> length, the new token included
PREFILL = [PrefillSpan(1, 25, 18), PrefillSpan(2, 0, 9)]
WINDOWS = (0, 5, 22)


@pytest.mark.parametrize("page_size", [4, 7])
@pytest.mark.parametrize("gather_tokens", [1, 40, 1024])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_rows_see_their_windows_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, page_size: int, gather_tokens: int, softcap: float
) -> None:
    """Pages of columns that no token of a row sees are full of NaN, as another request's may be."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch_backend, "GATHER_TOKENS", gather_tokens)
    spans = [PrefillSpan(slot, length - 1, 1) for slot, length in DECODE.items()] + PREFILL
    tables = torch.stack([torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS) for _ in WINDOWS])
    backend = TorchBackend(page_size, tuple(KVGroup(window, SLOTS * COLUMNS) for window in WINDOWS), torch.float32)
    metadata = backend.make(Rows(tuple(DECODE), tuple(DECODE.values()), tuple(PREFILL)), tables)
    q = torch.randn(sum(span.num_tokens for span in spans), HEADS, HEAD_DIM)
    for group, window in enumerate(WINDOWS):
        full = torch.randn(2, SLOTS * COLUMNS, page_size, KV_HEADS, HEAD_DIM)
        holed = torch.full_like(full, torch.nan)
        wanted = []
        first = 0
        for span in spans:
            end = span.start + span.num_tokens
            skipped = max(0, span.start + 1 - window) // page_size if window else 0
            held = tables[group, span.slot, skipped : -(-end // page_size)]
            holed[:, held] = full[:, held]
            rows = q[first : first + span.num_tokens]
            pages = tables[group, span.slot]
            wanted.append(
                prefill_attention_reference(rows, (full[0], full[1]), pages, span.start, window, 0.4, softcap)
            )
            first += span.num_tokens
        got = backend.attend(q, KVPages(holed[0], holed[1]), metadata, AttentionSpec(group, 0.4, softcap))
        torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=3e-6)


def test_a_step_without_decode_rows_or_without_prefill_rows() -> None:
    backend = TorchBackend(4, (KVGroup(0, 8), KVGroup(5, 8)), torch.float32)
    tables = torch.arange(16).view(2, 2, 4)
    decode_only = backend.make(Rows((0, 1), (3, 9), ()), tables)
    prefill_only = backend.make(Rows((), (), (PrefillSpan(1, 2, 6),)), tables)
    assert [len(group.prefill) for group in decode_only.groups] == [0, 0]
    assert [len(group.decode) for group in prefill_only.groups] == [0, 0]
    # A row of 9 tokens with a window of 5 sees places 4 to 8: columns 1 and 2. The other row has its one page twice.
    assert decode_only.groups[1].decode[0].pages.tolist() == [8, 8, 13, 14]
