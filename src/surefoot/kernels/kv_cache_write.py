"""Writes a step's keys and values into their pages."""

from __future__ import annotations

from torch import Tensor


def kv_cache_write(cache: Tensor, new: Tensor, places: Tensor) -> None:
    """cache[places[i]] = new[i].

    cache: [pages, page_size, kv_heads, head_dim], contiguous. new: [tokens, kv_heads, head_dim].
    places: [tokens] int64, page * page_size + offset, each at most once.
    """
    cache.view(-1, *cache.shape[2:]).index_copy_(0, places, new)
