"""A server in this process, over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaConfig

from surefoot.config import resolve, settings
from surefoot.config.engine_plan import CheckpointRef, NativeKernels, ServerPlan
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_readers import read_model_spec
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from surefoot.http.app import create_app
from tests.http.fake_engine import FakeEngine, Script
from tests.tiny import write_tokenizer

MODEL = "tiny"
ANSWER = "Grüße 👋 from the fox. " * 3  # 63 tokens of the tiny tokenizer; characters are split over tokens


def server_plan(path: str, **changes: Any) -> ServerPlan:
    """Of a model that nobody loads: only its vocabulary and its bounds matter here."""
    asked = settings.load(
        {
            "model": path,
            "served_model_name": MODEL,
            "port": 0,
            "seed": 7,
            "max_model_len": 200,
            "max_running_requests": 4,
            "max_queued_requests": 4,
            "kv_cache_tokens": 1600,
        }
    )
    checkpoint = CheckpointRef(path, "safetensors")
    hardware = HardwareSpec("x86_64", "a CPU", ("avx2",), 2, 1 << 30)
    engine = resolve.resolve(
        asked, checkpoint, read_model_spec(checkpoint), hardware, NativeKernels("", "none here", 0)
    )
    return msgspec.structs.replace(resolve.server_plan(asked, engine), **changes)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    LlamaConfig(vocab_size=301, hidden_size=48, num_hidden_layers=2, num_attention_heads=6).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer(CheckpointRef(str(tokenizer_path), "safetensors"))


@dataclass(frozen=True)
class Server:
    http: httpx.AsyncClient
    engine: FakeEngine
    client: EngineClient
    app: FastAPI

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **({"messages": [{"role": "user", "content": "hi"}]} | body))

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **({"prompt": "the quick"} | body))

    async def metric(self, name: str, at: str = "/metrics", **labels: str) -> float:
        text = (await self.http.get(at)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        [value] = [
            sample.value for sample in samples if (sample.name, sample.labels) == (name, {"model_name": MODEL} | labels)
        ]
        return value


def answers(tokenizer: Tokenizer, text: str = ANSWER) -> Script:
    """Every request is answered with `text` and the end-of-text token."""
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]
    return lambda request: token_ids


@pytest.fixture
def with_server(tokenizer: Tokenizer, tokenizer_path: Path) -> Callable[..., None]:
    """`with_server(test, ...)` runs the coroutine function `test` against a ready server."""
    plain_answers = answers(tokenizer)

    @asynccontextmanager
    async def serve(script: Script, places: int, ready: bool, **changes: Any) -> AsyncIterator[Server]:
        engine = FakeEngine(script, places)
        client = EngineClient(engine, engine)
        app = create_app(server_plan(str(tokenizer_path), **changes), tokenizer, client)
        receiving = asyncio.create_task(client.run())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            if ready:
                engine.ready()
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.001)
            yield Server(http, engine, client, app)
        assert not receiving.done(), receiving
        receiving.cancel()

    def run(
        test: Callable[[Server], Awaitable[None]],
        script: Script = plain_answers,
        places: int = 8,
        ready: bool = True,
        seconds: float = 20,
        **changes: Any,
    ) -> None:
        async def body() -> None:
            async with asyncio.timeout(seconds), serve(script, places, ready, **changes) as server:
                await test(server)

        asyncio.run(body())

    return run
