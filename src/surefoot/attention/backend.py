"""The interface of grouped-query attention backends. What each implements is declared in config.catalog."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from surefoot.attention.forward_inputs import Metadata, Rows
from surefoot.attention.kv_cache import KVPages


class AttentionBackend(Protocol[Metadata]):
    def make(self, rows: Rows, page_table: Tensor) -> Metadata:
        """The backend's own record of one step. page_table: [slots, columns] page ids."""

    def attend(self, q: Tensor, cache: KVPages, metadata: Metadata) -> Tensor:
        """q: [tokens, heads, head_dim], decode rows first. The step's KV is already in `cache`. Returns q's shape."""
