"""Whatever a client sends, it gets an answer of the documented shape or a 4xx that says what is wrong; never a 5xx."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from surefoot.http.answer_schema import ChatCompletion, Detokenized, ErrorBody, TextCompletion, Tokenized
from tests.http.conftest import ANSWER, MODEL
from tests.http.test_openai_client import RunningServer

HI = [{"role": "user", "content": "hi"}]
# For each endpoint a body with all that it takes, of which each request has some.
BODIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletion,
        {"model": MODEL, "messages": HI},
        {"n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["fox"], "max_tokens": 5, "temperature": 0.5, "seed": 1}
        | {"logit_bias": {"5": 1}, "min_tokens": 2, "prompt_logprobs": 1, "chat_template_kwargs": {"a": [1, {}]}},
    ),
    "/v1/completions": (
        TextCompletion,
        {"model": MODEL, "prompt": "the fox"},
        {"n": 2, "logprobs": 1, "echo": True, "stop": "fox", "max_tokens": 5, "prompt": [[5, 6], [7]], "best_of": 2}
        | {"repetition_penalty": 1.5, "top_p": 0.5, "top_k": 5, "truncate_prompt_tokens": 3, "cache_salt": "a"},
    ),
    "/tokenize": (Tokenized, {"prompt": "the fox"}, {"return_token_strs": True, "add_special_tokens": False}),
    "/detokenize": (Detokenized, {"tokens": [5, 6]}, {"model": MODEL}),
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, 5e-324),
    *("", "a", "\0", "\ud800", "ß👋", "<|im_end|>", "5", "true", "x" * 5000),
    *([], [[]], [None], [0], [-1], [2**70], ["a"], ["a", 5], [True], [0.5], [{}], list(range(300))),
    *({}, {"": ""}, {"5": 1}, {"type": "text"}, {"role": "user", "content": "a"}, {"a": {"b": [{"c": None}]}}),
    [{"role": "assistant", "content": [{"type": "text", "text": "\ud83d"}]}],
]


def odd_body(generator: random.Random, required: dict[str, Any], optional: dict[str, Any]) -> bytes:
    body = dict(required)
    for name in generator.sample(sorted(optional), generator.randint(0, min(3, len(optional)))):
        body[name] = optional[name]
    for _ in range(generator.randint(0, 2)):
        names = [*required, *optional, "stream_options", "response_format", "typo", "", "\ud800"]
        body[generator.choice(names)] = generator.choice(ODD)
    raw = json.dumps(body, allow_nan=True).encode()
    if generator.random() < 0.3:  # damaged on the way
        at = generator.randrange(len(raw) + 1)
        damage = generator.choice([b"", b"\xff", b"\0", b'"', b"{", b"]" * 3, b"NaN", b"[" * 2000, b"9" * 5000, b"\\"])
        raw = raw[:at] + damage + raw[at + generator.randint(0, 3) :]
    return raw


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_odd_bodies(with_server, tokenizer, count):
    generator = random.Random(count)
    token_ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    statuses: dict[int, int] = {}

    async def one(server) -> None:
        path = generator.choice(list(BODIES))
        shape, required, optional = BODIES[path]
        raw = odd_body(generator, required, optional)
        kind = generator.choice(["application/json"] * 20 + ["text/plain", "application/xml; charset=x", "", "é"])
        response = await server.http.post(path, content=raw, headers={"Content-Type": kind.encode()})
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        if response.status_code == 200:
            shape.model_validate(response.json())
        else:
            assert 400 <= response.status_code < 500, (path, raw, response.text)
            assert ErrorBody.model_validate(response.json()).error.message

    async def test(server):
        for _ in range(count):
            async with asyncio.timeout(20):
                await one(server)

    with_server(test, script=lambda request: (token_ids * 10)[: request.max_new_tokens], seconds=3600)
    assert statuses[200] > count / 20
    assert statuses[400] > count / 4


def test_raw_bytes_instead_of_http(tokenizer, tokenizer_path):
    """The server goes on serving others whatever a connection brings."""
    generator = random.Random(1)
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n"
    head += b"Content-Type: application/json\r\n"
    good = head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    with RunningServer(tokenizer, tokenizer_path) as server:
        assert exchange(server, good).startswith(b"HTTP/1.1 200 ")
        old = good.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Connection: close\r\n", b"")
        assert b" 200 " in exchange(server, old).partition(b"\r\n")[0]
        chunked = head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        in_chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:])) + b"0\r\n\r\n"
        assert exchange(server, chunked + in_chunks).startswith(b"HTTP/1.1 200 ")
        for _ in range(100):
            at = generator.randrange(len(good))
            damaged = good[:at] + generator.randbytes(generator.randint(0, 4)) + good[at + generator.randint(0, 4) :]
            answer = exchange(server, damaged, leave=True)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4")), (damaged, answer)
        assert exchange(server, good).startswith(b"HTTP/1.1 200 ")


def exchange(server: RunningServer, request: bytes, leave: bool = False) -> bytes:
    """All that is answered. `leave`: no more will be sent, for requests that may be incomplete."""
    with socket.create_connection(server.listener.getsockname(), timeout=10) as connection:
        connection.sendall(request)
        if leave:
            connection.settimeout(0.05)
        answer = b""
        try:
            while received := connection.recv(65536):
                answer += received
        except (TimeoutError, ConnectionResetError):
            assert leave
        return answer


@pytest.mark.slow
def test_schemathesis_finds_nothing(tokenizer, tokenizer_path):
    """What is not in the document (rules between parameters, ranges, ids) makes valid bodies refused: not checked."""
    with RunningServer(tokenizer, tokenizer_path) as server:
        endless = tokenizer.encode(ANSWER, add_special_tokens=False) * 10
        server.engine.script = lambda request: list(islice(endless, request.max_new_tokens))
        document = server.url.removesuffix("/v1") + "/openapi.json"
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", document]
        command += ["-H", "Authorization: Bearer secret", "--seed", "1", "--max-examples", "100"]
        command += ["--exclude-checks", "positive_data_acceptance"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert ran.returncode == 0, ran.stdout
