"""The portable backend: torch operations only, every path.

Gathering pages copies them. The copy is cheap while it stays in a core's cache and several times slower beyond, so
decode rows are taken in groups of similar length of at most GATHER_TOKENS tokens (docs/performance.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import AttentionMetadata, PrefillSpan, Rows
from surefoot.attention.kv_cache import KVPages
from surefoot.kernels.decode_attention import decode_attention
from surefoot.kernels.prefill_attention import prefill_attention

GATHER_TOKENS = 1024


@dataclass(frozen=True)
class DecodeGroup:
    rows: slice | Tensor  # which decode rows of the step: all of them, or [n] int64
    pages: Tensor  # [n * columns] int64
    mask: Tensor  # [n, 1, 1, columns * page_size]


@dataclass(frozen=True)
class PrefillPart:
    first: int  # token of the step
    last: int  # one past
    pages: Tensor  # [columns] int64
    mask: Tensor  # [last - first, columns * page_size]


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillPart, ...]


class TorchBackend:
    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self._page_size = page_size
        self._dtype = dtype

    def make(self, rows: Rows, page_table: Tensor) -> TorchMetadata:
        decode = tuple(self._decode_group(rows, group, page_table) for group in self._groups(rows.decode_lengths))
        prefill = []
        first = len(rows.decode_slots)
        for span in rows.prefill:
            prefill.append(self._prefill_part(span, first, page_table))
            first += span.num_tokens
        return TorchMetadata(decode, tuple(prefill))

    def attend(self, q: Tensor, cache: KVPages, metadata: TorchMetadata) -> Tensor:
        out = torch.empty_like(q)
        for group in metadata.decode:
            out[group.rows] = decode_attention(q[group.rows], cache.keys, cache.values, group.pages, group.mask)
        for part in metadata.prefill:
            rows = slice(part.first, part.last)
            out[rows] = prefill_attention(q[rows], cache.keys, cache.values, part.pages, part.mask)
        return out

    def _groups(self, lengths: tuple[int, ...]) -> list[list[int]]:
        """All rows if their padded copy stays within GATHER_TOKENS; else rows by length, longest first, in groups
        that do."""
        if not lengths:
            return []
        if len(lengths) * max(lengths) <= GATHER_TOKENS:
            return [list(range(len(lengths)))]
        groups: list[list[int]] = []
        room = 0
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if room <= 0:
                groups.append([])
                room = max(1, GATHER_TOKENS // lengths[row])
            groups[-1].append(row)
            room -= 1
        return groups

    def _decode_group(self, rows: Rows, group: list[int], page_table: Tensor) -> DecodeGroup:
        own_lengths = [rows.decode_lengths[row] for row in group]
        lengths = torch.tensor(own_lengths)
        columns = self._columns(max(own_lengths))
        pages = page_table[[rows.decode_slots[row] for row in group], :columns]
        # Past a row's end the table may name pages of others: its own first page is read there instead.
        past_end = torch.arange(columns) * self._page_size >= lengths[:, None]
        pages = torch.where(past_end, pages[:, :1], pages)
        places = torch.arange(columns * self._page_size)
        mask = torch.zeros(len(group), columns * self._page_size, dtype=self._dtype)
        mask.masked_fill_(places >= lengths[:, None], -torch.inf)
        everybody = group == list(range(len(rows.decode_slots)))
        which = slice(0, len(group)) if everybody else torch.tensor(group)
        return DecodeGroup(which, pages.flatten(), mask[:, None, None, :])

    def _prefill_part(self, span: PrefillSpan, first: int, page_table: Tensor) -> PrefillPart:
        columns = self._columns(span.start + span.num_tokens)
        places = torch.arange(columns * self._page_size)
        mask = torch.zeros(span.num_tokens, columns * self._page_size, dtype=self._dtype)
        mask.masked_fill_(places > (span.start + torch.arange(span.num_tokens))[:, None], -torch.inf)
        return PrefillPart(first, first + span.num_tokens, page_table[span.slot, :columns], mask)

    def _columns(self, length: int) -> int:
        return -(-length // self._page_size)
