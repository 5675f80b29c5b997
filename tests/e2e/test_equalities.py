"""The same request gives the same answer through HTTP, under concurrency, with prefix cache, preemption and lookahead
on, as alone and offline without them. That they were on is read from the server's metrics."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from surefoot import LLM, SamplingParams
from tests.e2e.conftest import TIGHT
from tests.e2e.gauges import PREEMPTIONS, PREFIX_HITS, value
from tests.e2e.server import Server
from tests.native_kernels import native_library
from tests.tiny import TinyLlama

BATCH_TOKENS = 160
STEM = [(3 * i * i + i) % 280 + 10 for i in range(60)]


def requests() -> list[dict[str, Any]]:
    """27 prompts, of which most share a prefix of 0 to 60 tokens; greedy and seeded draws of every sampler kind."""
    rng = random.Random(7)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 6, "top_k": 20},
        {"temperature": 1.3, "seed": 7, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0, "min_tokens": 12},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.7, "presence_penalty": -0.5},
        {"temperature": 0, "logit_bias": {"40": 3, "50": -100}},
        {"temperature": 0.8, "seed": 9, "logprobs": 3},
    ]
    made = []
    for number in range(27):
        prompt = STEM[: rng.choice([0, 8, 17, 40, 60])] + [rng.randrange(10, 300) for _ in range(rng.randrange(1, 30))]
        made.append({"prompt": prompt, "max_tokens": rng.randrange(12, 36), **samplings[number % len(samplings)]})
    return made


@cache
def answers(model: Path, cpu_kernels: str, weight_dtype: str) -> list[str]:
    """Each request alone, whole, without prefix cache, lookahead or need for preemption."""
    held = {"cpu_kernels": cpu_kernels, "weight_dtype": weight_dtype}
    settings = {"lookahead": 0, "disable_prefix_cache": True, "max_running_requests": 1, **held}
    with LLM(str(model), kv_cache_tokens=512, **settings) as llm:
        out = []
        for request in requests():
            params = {name: value for name, value in request.items() if name != "prompt"}
            bias = {int(token): value for token, value in params.pop("logit_bias", {}).items()}
            params = SamplingParams(**params, logit_bias=bias)
            out.append(llm.generate([request["prompt"]], params)[0].text)
        return out


async def ask(client: httpx.AsyncClient, server: Server, request: dict[str, Any]) -> str:
    response = await client.post("/v1/completions", json={"model": server.model_name, **request})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def ask_streamed(client: httpx.AsyncClient, server: Server, request: dict[str, Any]) -> str:
    text = ""
    body = {"model": server.model_name, "stream": True, **request}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def all_at_once(server: Server, twice: bool) -> list[list[str]]:
    """Every request whole and streamed, all concurrent; and again when their prefixes are cached."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        rounds = []
        for _ in range(1 + twice):
            asked = [ask(client, server, request) for request in requests()]
            asked += [ask_streamed(client, server, request) for request in requests()]
            rounds.append(list(await asyncio.gather(*asked)))
        return rounds


@pytest.mark.parametrize(
    "chunk, lookahead, weight_dtype, kernels",
    [
        (1, 1, "float32", "native/native"),
        (7, 1, "float32", "native/native"),
        (8, 1, "float32", "native/native"),
        (256, 1, "float32", "native/native"),
        (16, 0, "float32", "native/native"),
        (7, 1, "float16", "native/native"),
        (7, 1, "float32", "torch/dense"),
        (7, 1, "float16", "torch/fp16_packed"),
    ],
    ids=["one", "odd", "page", "whole", "lookahead-0", "fp16", "torch", "torch-fp16"],
)
def test_answers_do_not_depend_on_how_they_were_computed(
    tiny_llama: TinyLlama, log: Path, chunk: int, lookahead: int, weight_dtype: str, kernels: str
) -> None:
    held = {"weight_dtype": weight_dtype, "cpu_kernels": kernels.split("/")[0]}
    if kernels == "native/native":
        native_library()
    wanted = answers(tiny_llama.path, **held)
    tight = dict(TIGHT, chunked_prefill_size=chunk, lookahead=lookahead, **held)
    with Server(log, model=tiny_llama.path, **tight) as server:
        for got in asyncio.run(all_at_once(server, twice=chunk != 1)):
            assert got == wanted + wanted
        # Temperature only, and alone: beside others, a step takes the sampler that all its rows need.
        body = {"model": server.model_name, **requests()[1]}
        alone = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert alone["choices"][0]["text"] == wanted[1]
        paths = server.paths()
        assert value(server, PREEMPTIONS) > 0
        assert value(server, PREFIX_HITS) > 0
        for kind in ("decode/none", "mixed/some", "mixed/none"):
            assert any(path.startswith(kind) for path in paths), (kind, paths)
        assert all(f"/{kernels}/" in path for path in paths), paths
        for sampler in ("greedy/none", "plain/none", "full/none", "full/output"):
            assert any(path.endswith(sampler) for path in paths), (sampler, paths)
        assert server.stop() == 0


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch_of_32(tiny_llama: TinyLlama, log: Path) -> None:
    """That they ran in one batch is read from the number of steps."""
    drawn = [{**request, "seed": 100 + at} for at, request in enumerate(requests()) if request["temperature"]]
    asked = [{**drawn[at % len(drawn)], "seed": at, "max_tokens": BATCH_TOKENS, "ignore_eos": True} for at in range(32)]
    wide = dict(TIGHT, max_running_requests=32, max_model_len=256, kv_cache_tokens=32 * 256)

    async def at_once(server: Server) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return list(await asyncio.gather(*(ask(client, server, request) for request in asked)))

    async def in_turn(server: Server) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return [await ask(client, server, request) for request in asked]

    with Server(log, model=tiny_llama.path, lookahead=1, **wide) as server:
        together = asyncio.run(at_once(server))
        steps = sum(count for name, count in server.metrics().items() if "steps_total{" in name)
        assert 32 * BATCH_TOKENS / steps > 16  # rows in a step, on average: they come and end one after another
        assert asyncio.run(in_turn(server)) == together
    assert len(set(together)) == 32


def test_chat_is_completion_of_the_rendered_template(tight_server: Server, tiny_llama: TinyLlama) -> None:
    from surefoot.config.engine_plan import CheckpointRef
    from surefoot.frontend.tokenizer import load_tokenizer

    messages = [{"role": "user", "content": "the quick brown fox 42 😀"}]
    rendered = load_tokenizer(CheckpointRef(str(tiny_llama.path), "safetensors")).apply_chat_template(messages)
    common = {"model": tight_server.model_name, "temperature": 0, "max_tokens": 20}
    chat = httpx.post(f"{tight_server.url}/v1/chat/completions", json={"messages": messages, **common}).json()
    completion = httpx.post(f"{tight_server.url}/v1/completions", json={"prompt": rendered, **common}).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"]
