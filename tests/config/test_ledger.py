"""The ledger's bytes against what is really allocated."""

from __future__ import annotations

import pytest
import torch

from surefoot import LLM
from surefoot.attention.kv_cache import KVCache
from surefoot.config.ledger import ledger
from tests.tiny import TinyLlama


@pytest.mark.parametrize("weight_dtype", ["float32", "float16"])
def test_lines_are_what_is_allocated(tiny_llama: TinyLlama, weight_dtype: str) -> None:
    settings = {"max_running_requests": 3, "kv_cache_tokens": 400, "max_penalised_requests": 2}
    with LLM(str(tiny_llama.path), weight_dtype=weight_dtype, **settings) as llm:
        lines = {line.owner: line.bytes for line in ledger(llm.plan)}
        cache = KVCache.allocate(llm.plan.model, llm.plan.bounds, torch.float32)
        assert lines["KV cache"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        matrices = sum(weight.numel() for weight in tiny_llama.model.parameters() if weight.dim() == 2)
        assert lines["weights"] == matrices * (4 if weight_dtype == "float32" else 2)
        assert sum(lines.values()) == llm.plan.hardware.memory_available
        assert list(lines) == ["weights", "KV cache", "sampling", "penalties", "activations", "left"]
