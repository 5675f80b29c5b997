"""What is declared is what is implemented."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from surefoot.attention.kv_cache import KVCache
from surefoot.attention.torch_backend import TorchBackend
from surefoot.config.bounds import Bounds, KVGroup
from surefoot.config.catalog import ATTENTION_BACKENDS, DTYPE_BYTES, FAMILIES, kv_pages_layout
from surefoot.config.hf_readers import ARCHITECTURES, READERS
from surefoot.models.registry import NAMINGS, weight_rules
from surefoot.runner.model_runner import TORCH_DTYPES
from tests.config.specs import SPEC, spec


def test_every_family_has_a_reader_and_rules_for_both_formats() -> None:
    assert set(FAMILIES) == set(READERS) == set(ARCHITECTURES.values()) == set(NAMINGS)
    for formats in NAMINGS.values():
        assert set(formats) == {"gguf", "safetensors"}
    with pytest.raises(ValueError, match="no weight rules for the family 'qwen9'"):
        weight_rules(replace(SPEC, family="qwen9"), "gguf")


def test_dtypes_have_their_sizes() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == DTYPE_BYTES


def test_the_layout_counts_the_bytes_that_are_allocated() -> None:
    """In each KV group, of which this model has one of three layers and one of one."""
    model = spec(windows=(0, 24), layers=(1, 1, 0, 1))
    bounds = Bounds(
        page_size=16,
        kv_groups=(KVGroup(0, 5), KVGroup(24, 3)),
        max_model_len=64,
        max_running_requests=2,
        max_queued_requests=2,
        chunked_prefill_size=16,
        count_rows=1,
        logits_rows=2,
    )
    cache = KVCache.allocate(model, bounds, torch.float32)
    layout = kv_pages_layout(model, "float32")
    for group, (of_group, bytes_per_token) in enumerate(zip(bounds.kv_groups, layout.bytes_per_token, strict=True)):
        layers = [cache.layers[i] for i, kind in enumerate(model.layers) if kind == group]
        allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        pages = of_group.num_pages + 1  # the sink page
        assert allocated == pages * bounds.page_size * bytes_per_token


def test_the_torch_backend_is_declared() -> None:
    declared = ATTENTION_BACKENDS["torch"]
    assert declared.kv_layouts == ("kv_pages",)
    assert TorchBackend(16, (KVGroup(0, 5),), TORCH_DTYPES[declared.dtypes[0]])
