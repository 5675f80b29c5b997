"""`surefoot bench serve` against a real server with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from surefoot import cli
from surefoot.bench.results import BenchResult
from tests.e2e.server import Server
from tests.tiny import TinyLlama


@pytest.fixture(scope="module")
def server(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    settings = {"weight_dtype": "float32", "max_model_len": 256, "page_size": 8, "kv_cache_tokens": 4096}
    with Server(log, model=tiny_llama.path, **settings) as server:
        yield server


def bench(server: Server, tmp_path: Path, *flags: str) -> BenchResult:
    file = tmp_path / "result.json"
    assert cli.main(["bench", "serve", server.url, "--json", str(file), "--concurrency", "3", *flags]) == 0
    return msgspec.json.decode(file.read_bytes(), type=BenchResult)


@pytest.mark.parametrize(
    "flags, requests, least, most",
    [
        (("--input", "20-40", "--vocab-size", "300"), 6, 0.0, 0.02),
        (("--workload", "prefix", "--prefix-length", "64", "--input", "8", "--vocab-size", "300"), 6, 0.3, 0.9),
        (("--workload", "conversations", "--turns", "3", "--input", "4"), 18, 0.1, 0.9),
        (("--chat", "--input", "6"), 6, 0.0, 0.9),
        (("--input", "24", "--vocab-size", "300", "--prompts", "same", "--repeat", "2"), 6, 0.0, 1.0),
    ],
    ids=["random", "prefix", "conversations", "chat", "same"],
)
def test_each_workload(
    server: Server, tmp_path: Path, flags: tuple[str, ...], requests: int, least: float, most: float
) -> None:
    result = bench(server, tmp_path, "--requests", "6", "--output", "7", *flags)
    assert result.servers[0].software.startswith("surefoot ")
    assert len(result.servers[0].plan_hash) == 12
    for run in result.runs:
        assert [(one.error, one.output_tokens) for one in run.requests] == [("", 7)] * requests
        assert least <= run.hit_rate <= most
        told = sum(one.cached_tokens for one in run.requests) / sum(one.prompt_tokens for one in run.requests)
        assert run.hit_rate == pytest.approx(told)
    if "same" in flags:
        assert result.runs[1].hit_rate > 0.5
        assert "since every run sends the same prompts" in result.warnings[-1]
    else:
        assert result.warnings == ()
