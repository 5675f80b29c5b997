"""Every family through HTTP, with windows that are shorter than the prompts: under concurrency, with prefix cache,
preemption and lookahead on, each request is answered as alone and offline without them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.conftest import TIGHT
from tests.e2e.gauges import PREEMPTIONS, PREFIX_HITS, value
from tests.e2e.server import Server
from tests.e2e.test_equalities import all_at_once, answers
from tests.tiny_families import FAMILIES, write_tiny, write_tiny_gguf


@pytest.mark.parametrize("format", ["safetensors", pytest.param("gguf", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_do_not_depend_on_how_they_were_computed(tmp_path: Path, log: Path, family: str, format: str) -> None:
    (tmp_path / "model").mkdir()
    tiny = write_tiny(family, tmp_path / "model")
    if format == "gguf":
        tiny = write_tiny_gguf(tiny, tmp_path / "model.gguf")
    wanted = answers(tiny.path, "auto", "float32")
    assert len(set(wanted)) > 20  # the model tells the requests apart
    tight = dict(TIGHT, chunked_prefill_size=7, served_model_name="tiny")
    with Server(log, model=tiny.path, **tight) as server:
        for got in asyncio.run(all_at_once(server, twice=True)):
            assert got == wanted + wanted
        paths = server.paths()
        assert value(server, PREEMPTIONS) > 0
        assert value(server, PREFIX_HITS) > 0
        for kind in ("decode/none", "mixed/some", "mixed/none"):
            assert any(path.startswith(kind) for path in paths), (kind, paths)
