"""What is declared is what is implemented."""

from __future__ import annotations

import torch

from surefoot.attention.kv_cache import KVCache
from surefoot.attention.torch_backend import TorchBackend
from surefoot.config.bounds import Bounds
from surefoot.config.catalog import ATTENTION_BACKENDS, DTYPE_BYTES, FAMILIES, kv_pages_layout
from surefoot.models.registry import weight_rules
from surefoot.runner.model_runner import TORCH_DTYPES
from tests.config.test_resolve import SMOLLM2


def test_every_family_has_rules_for_both_formats() -> None:
    for family in FAMILIES:
        for format in ("gguf", "safetensors"):
            assert weight_rules(SMOLLM2, format).rules, family  # type: ignore[arg-type]


def test_dtypes_have_their_sizes() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == DTYPE_BYTES


def test_the_layout_counts_the_bytes_that_are_allocated() -> None:
    bounds = Bounds(16, 5, 64, 2, 2, 16)
    cache = KVCache.allocate(SMOLLM2, bounds, torch.float32)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    pages = bounds.num_pages + 1  # the sink page
    assert allocated == pages * bounds.page_size * kv_pages_layout(SMOLLM2, "float32").bytes_per_token


def test_the_torch_backend_is_declared() -> None:
    declared = ATTENTION_BACKENDS["torch"]
    assert declared.kv_layouts == ("kv_pages",)
    assert TorchBackend(16, TORCH_DTYPES[declared.dtypes[0]])
