"""The paged cache of keys and values. This file owns its layout: bytes, strides and writer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.config.bounds import Bounds
from surefoot.config.model_spec import ModelSpec
from surefoot.kernels.kv_cache_write import kv_cache_write
from surefoot.native.kernels import zeros_in_huge_pages


class KVPages:
    """One layer's cache for grouped-query attention: layout "kv_pages" of config.catalog."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys  # [pages, page_size, kv_heads, head_dim]
        self.values = values

    def write(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """keys, values: [tokens, kv_heads, head_dim]; places: [tokens], see ForwardInputs."""
        kv_cache_write(self.keys, keys, places)
        kv_cache_write(self.values, values, places)

    def clear(self, pages: Tensor) -> None:
        """pages: [n] page ids."""
        self.keys.index_fill_(0, pages, 0)
        self.values.index_fill_(0, pages, 0)


class KVCache:
    """All layers' pages, and in each KV group one page more than the scheduler knows of: its last one, the sink page,
    which nobody owns."""

    def __init__(self, layers: tuple[KVPages, ...], groups: tuple[int, ...]) -> None:
        self.layers = layers
        self._groups = groups  # each layer's KV group

    def clear(self, group: int, pages: list[int]) -> None:
        """For pages that get a new owner: it must not see what the last one left. Places past a row's end are read
        with weight 0, and 0 times NaN is NaN."""
        if pages:
            index = torch.tensor(pages)
            for layer, layer_group in zip(self.layers, self._groups, strict=True):
                if layer_group == group:
                    layer.clear(index)

    @classmethod
    def allocate(cls, spec: ModelSpec, bounds: Bounds, dtype: torch.dtype) -> KVCache:
        """On the CPU. Zeroed, since masked places may be read, and untouched: torch.zeros would write every byte."""

        def zeros(num_pages: int) -> Tensor:
            shape = (num_pages + 1, bounds.page_size, spec.num_kv_heads, spec.head_dim)
            size = math.prod(shape) * dtype.itemsize
            return torch.from_numpy(zeros_in_huge_pages(size)).view(dtype).view(shape)

        sizes = [bounds.kv_groups[kind].num_pages for kind in spec.layers]
        return cls(tuple(KVPages(zeros(size), zeros(size)) for size in sizes), spec.layers)
