"""The interface of grouped-query attention backends. What each implements is declared in config.catalog."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from surefoot.attention.forward_inputs import AttentionSpec, Metadata, Rows
from surefoot.attention.kv_cache import KVPages


class AttentionBackend(Protocol[Metadata]):
    def make(self, rows: Rows, page_tables: Tensor) -> Metadata:
        """The backend's own record of one step. page_tables: [KV groups, slots, columns] page ids; columns before a
        group's window name pages of others."""

    def attend(self, q: Tensor, cache: KVPages, metadata: Metadata, spec: AttentionSpec) -> Tensor:
        """q: [tokens, heads, head_dim], decode rows first. The step's KV is already in `cache`. Returns q's shape."""
