"""The official client against the default model, as a newcomer would use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from surefoot import LLM, SamplingParams
from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "log", api_key="secret") as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_a_repeated_prompt_comes_from_the_cache(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_stream_and_whole_and_offline_agree(client: openai.OpenAI, default_model_path: Path) -> None:
    story = [{"role": "user", "content": "Tell me a story about a lighthouse, with an emoji."}]
    whole = client.chat.completions.create(model=MODEL, messages=story, temperature=0.9, seed=3, max_tokens=80)
    stream = client.chat.completions.create(
        model=MODEL, messages=story, temperature=0.9, seed=3, max_tokens=80, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    with LLM(max_running_requests=4, max_model_len=1024) as llm:
        offline = llm.chat(story, SamplingParams(temperature=0.9, seed=3, max_tokens=80)).text
    assert whole.choices[0].message.content == streamed == offline
    assert len(streamed) > 100


def test_completions_and_stop(client: openai.OpenAI) -> None:
    count = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=20, stop=[" 8"])
    assert count.choices[0].text == " 5, 6, 7,"
    assert count.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"frequency_penalty is 2\.5") as bad:
        client.chat.completions.create(model=MODEL, messages=FRANCE, frequency_penalty=2.5)
    assert bad.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=MODEL, prompt="hello " * 9000)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=FRANCE)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == [MODEL]
