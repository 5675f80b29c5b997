from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.tiny import TinyLlama

# Few pages: eight requests that run at once need about twice as many, so that some are preempted.
TIGHT = {
    "weight_dtype": "float32",
    "max_running_requests": 8,
    "max_model_len": 128,
    "page_size": 8,
    "kv_cache_tokens": 200,
    "max_queued_requests": 200,
}


@pytest.fixture(scope="module")
def tight_server(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prefix cache, chunks of 16 tokens, lookahead 1, and a cache so small that requests are preempted."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, model=tiny_llama.path, chunked_prefill_size=16, lookahead=1, **TIGHT) as server:
        yield server


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"
