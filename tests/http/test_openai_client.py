"""The official client against a real port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from surefoot.frontend.engine_client import EngineClient
from surefoot.http.app import create_app
from tests.http.conftest import ANSWER, MODEL, answers, server_plan
from tests.http.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]


class RunningServer:
    """uvicorn with a fake engine, in a thread."""

    def __init__(self, tokenizer, tokenizer_path) -> None:
        self.tokenizer = tokenizer
        self.plan = server_plan(str(tokenizer_path), api_key="secret")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.engine = FakeEngine(answers(self.tokenizer))
        self.client = EngineClient(self.engine, self.engine)
        self.server = uvicorn.Server(
            uvicorn.Config(create_app(self.plan, self.tokenizer, self.client), lifespan="off", log_level="warning")
        )
        self.engine.ready()
        receiving = asyncio.create_task(self.client.run())
        await self.server.serve([self.listener])
        receiving.cancel()

    def __enter__(self) -> RunningServer:
        self.thread.start()
        wait(lambda: self.thread.is_alive() and "server" in vars(self) and self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()


def wait(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server(tokenizer, tokenizer_path) -> Iterator[RunningServer]:
    with RunningServer(tokenizer, tokenizer_path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream_with_usage(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, stop=[" the"]
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ANSWER[: ANSWER.index(" the")]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=8)
    assert [choice.text for choice in answer.choices] == ["Grüße "] * 2
    stream = client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Grüße "


def test_choices_and_logprobs(client):
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=2, max_tokens=8)
    assert [choice.message.content for choice in answer.choices] == ["Grüße "] * 2
    for choice in answer.choices:
        content = choice.logprobs.content
        assert bytes(byte for entry in content for byte in entry.bytes).decode() == "Grüße "
        assert all(len(entry.top_logprobs) == 2 for entry in content)
    text = client.completions.create(model=MODEL, prompt="a", echo=True, logprobs=1, max_tokens=8)
    told = text.choices[0].logprobs
    assert (told.token_logprobs[0], text.choices[0].text) == (None, "aGrüße ")
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 1 + 8


def test_extensions_go_in_extra_body(client, server):
    client.completions.create(model=MODEL, prompt="a", extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True})
    assert server.engine.submitted[-1].sampling.top_k == 5


@pytest.mark.parametrize(
    "options, error, param",
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 99}, openai.BadRequestError, "n"),
        ({"model": "other"}, openai.NotFoundError, "model"),
    ],
    ids=str,
)
def test_errors_are_those_of_the_client(client, options, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": MODEL, "messages": HI} | options))
    assert caught.value.param == param


def test_a_wrong_key(server):
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_leaving_a_stream_aborts_the_request(client, server):
    with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
        next(stream)
    wait(lambda: server.engine.aborted and server.engine.aborted[-1] == server.engine.submitted[-1].id)


def test_a_client_that_closes_its_half_of_the_connection_has_left(server):
    """TCP does not tell the two apart, and a request whose client has left must not run on."""
    body = json.dumps({"model": MODEL, "messages": HI}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nAuthorization: Bearer secret\r\n\r\n"
    count = len(server.engine.submitted)
    with socket.create_connection(server.listener.getsockname()) as connection:
        connection.sendall(head.encode() + body)
        wait(lambda: len(server.engine.submitted) > count)
        connection.shutdown(socket.SHUT_WR)
        wait(lambda: server.engine.aborted and server.engine.aborted[-1] == server.engine.submitted[-1].id)
        assert connection.recv(1) == b""


def test_an_error_within_a_stream_is_raised(tokenizer, tokenizer_path):
    with (
        RunningServer(tokenizer, tokenizer_path) as server,
        openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0) as client,
    ):
        server.engine.script = lambda request: [5, 6]
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="no finite logits"):
            list(stream)
