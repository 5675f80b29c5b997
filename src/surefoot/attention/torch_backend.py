"""The portable backend: torch operations only, every path.

A row gathers the columns of its page table that some of its tokens see, and no others: columns before a window name
pages that may be another request's by now.

Gathering pages copies them. The copy is cheap while it stays in a core's cache and several times slower beyond, so
decode rows are taken in groups of similar length of at most GATHER_TOKENS tokens (docs/performance.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.attention.forward_inputs import AttentionMetadata, AttentionSpec, PrefillSpan, Rows
from surefoot.attention.kv_cache import KVPages
from surefoot.config.bounds import KVGroup
from surefoot.kernels.decode_attention import decode_attention
from surefoot.kernels.prefill_attention import prefill_attention

GATHER_TOKENS = 1024


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that are gathered together."""

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
class GroupRows:
    """The step's rows as the layers of one KV group see them."""

    decode: tuple[DecodeBatch, ...]
    prefill: tuple[PrefillPart, ...]


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    groups: tuple[GroupRows, ...]  # one per KV group


class TorchBackend:
    def __init__(self, page_size: int, kv_groups: tuple[KVGroup, ...], dtype: torch.dtype) -> None:
        self._page_size = page_size
        self._kv_groups = kv_groups
        self._dtype = dtype

    def make(self, rows: Rows, page_tables: Tensor) -> TorchMetadata:
        groups = zip(page_tables, self._kv_groups, strict=True)
        return TorchMetadata(tuple(self._group_rows(rows, table, group.window) for table, group in groups))

    def attend(self, q: Tensor, cache: KVPages, metadata: TorchMetadata, spec: AttentionSpec) -> Tensor:
        out = torch.empty_like(q)
        kv = (cache.keys, cache.values)
        rows_of_group = metadata.groups[spec.group]
        for batch in rows_of_group.decode:
            out[batch.rows] = decode_attention(q[batch.rows], kv, batch.pages, batch.mask, spec.scale, spec.softcap)
        for part in rows_of_group.prefill:
            rows = slice(part.first, part.last)
            out[rows] = prefill_attention(q[rows], kv, part.pages, part.mask, spec.scale, spec.softcap)
        return out

    def _group_rows(self, rows: Rows, page_table: Tensor, window: int) -> GroupRows:
        lengths = rows.decode_lengths
        skipped = [self._skipped_columns(length - 1, window) for length in lengths]
        gathered = [length - self._page_size * skip for length, skip in zip(lengths, skipped, strict=True)]
        decode = [
            self._decode_batch(rows, batch, [skipped[row] for row in batch], page_table, window)
            for batch in self._batches(gathered)
        ]
        prefill = []
        first = len(rows.decode_slots)
        for span in rows.prefill:
            prefill.append(self._prefill_part(span, first, page_table, window))
            first += span.num_tokens
        return GroupRows(tuple(decode), tuple(prefill))

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """All rows if their padded copy stays within GATHER_TOKENS; else rows by length, longest first, in batches
        that do."""
        if not lengths:
            return []
        if len(lengths) * max(lengths) <= GATHER_TOKENS:
            return [list(range(len(lengths)))]
        batches: list[list[int]] = []
        room = 0
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if room <= 0:
                batches.append([])
                room = max(1, GATHER_TOKENS // lengths[row])
            batches[-1].append(row)
            room -= 1
        return batches

    def _decode_batch(
        self, rows: Rows, batch: list[int], skipped: list[int], page_table: Tensor, window: int
    ) -> DecodeBatch:
        """skipped: columns before those that a row of `batch` sees."""
        own_lengths = [rows.decode_lengths[row] for row in batch]
        columns = max(self._columns(length) - skip for length, skip in zip(own_lengths, skipped, strict=True))
        lengths, first = torch.tensor(own_lengths)[:, None], torch.tensor(skipped)[:, None]
        column = first + torch.arange(columns)
        # Past a row's end the table may name pages of others: the first page that it sees is read there instead.
        column = torch.where(column * self._page_size < lengths, column, first)
        slots = torch.tensor([rows.decode_slots[row] for row in batch])[:, None]
        places = first * self._page_size + torch.arange(columns * self._page_size)
        unseen = places >= lengths
        if window:
            unseen |= places < lengths - window
        mask = torch.zeros(unseen.shape, dtype=self._dtype).masked_fill_(unseen, -torch.inf)
        everybody = batch == list(range(len(rows.decode_slots)))
        which = slice(0, len(batch)) if everybody else torch.tensor(batch)
        return DecodeBatch(which, page_table[slots, column].flatten(), mask[:, None, None, :])

    def _prefill_part(self, span: PrefillSpan, first: int, page_table: Tensor, window: int) -> PrefillPart:
        skipped, columns = self._skipped_columns(span.start, window), self._columns(span.start + span.num_tokens)
        places = torch.arange(skipped * self._page_size, columns * self._page_size)
        positions = torch.arange(span.start, span.start + span.num_tokens)[:, None]
        unseen = places > positions
        if window:
            unseen |= places <= positions - window
        mask = torch.zeros(unseen.shape, dtype=self._dtype).masked_fill_(unseen, -torch.inf)
        return PrefillPart(first, first + span.num_tokens, page_table[span.slot, skipped:columns], mask)

    def _columns(self, length: int) -> int:
        return -(-length // self._page_size)

    def _skipped_columns(self, position: int, window: int) -> int:
        """Columns that a token at `position` and those after it do not see."""
        return max(0, position + 1 - window) // self._page_size if window else 0
