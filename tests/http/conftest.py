"""A server in this process, over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from surefoot.config.bounds import Bounds
from surefoot.config.engine_plan import CheckpointRef, EnginePlan, KVLayout, ServerPlan
from surefoot.config.hardware import HardwareSpec
from surefoot.config.model_spec import ModelSpec, NoRopeScaling
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.tokenizer import Tokenizer, load_tokenizer
from surefoot.http.app import create_app
from tests.http.fake_engine import FakeEngine, Script
from tests.tiny import write_tokenizer

MODEL = "tiny"
ANSWER = "Grüße 👋 from the fox. " * 3  # 63 tokens of the tiny tokenizer; characters are split over tokens


def server_plan(path: str, **changes: Any) -> ServerPlan:
    engine = EnginePlan(
        checkpoint=CheckpointRef(path, "safetensors"),
        load_format="checkpoint",
        served_model_name=MODEL,
        model=ModelSpec("llama", 301, 48, 80, 3, 6, 2, 16, 1e-5, 10000.0, NoRopeScaling(), 512, False),
        hardware=HardwareSpec("x86_64", "a CPU", ("avx2",), 2, 1 << 30),
        device="cpu",
        num_threads=2,
        dtype="float32",
        weight_dtype="float32",
        linear_kernel="dense",
        attention_backend="torch",
        kv_layout=KVLayout("paged", "float32", 1024),
        bounds=Bounds(16, 100, 200, 4, 4, 64),
        prefix_cache=True,
        lookahead=1,
        seed=7,
        reasons=(),
    )
    settings = {"host": "127.0.0.1", "port": 0, "api_key": "", "drain_seconds": 5.0, "log_level": "info"}
    return ServerPlan(engine=engine, **(settings | changes))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
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

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


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
        **changes: Any,
    ) -> None:
        async def body() -> None:
            async with asyncio.timeout(20), serve(script, places, ready, **changes) as server:
                await test(server)

        asyncio.run(body())

    return run
