"""POST /tokenize and /detokenize: what the model would see, and back."""

from __future__ import annotations

import pytest

from surefoot.http.answer_schema import Detokenized, Tokenized
from tests.http.conftest import MODEL
from tests.http.test_refusals import check_error

TEXT = "the quick 👋<|im_end|>"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(with_server, tokenizer, prefix):
    async def test(server):
        told = (await server.http.post(f"{prefix}/tokenize", json={"prompt": TEXT})).json()
        Tokenized.model_validate(told)
        ids = tokenizer.encode(TEXT, add_special_tokens=True)
        assert told == {"count": len(ids), "max_model_len": 200, "tokens": ids, "token_strs": None}
        back = (await server.http.post(f"{prefix}/detokenize", json={"tokens": ids, "model": MODEL})).json()
        Detokenized.model_validate(back)
        assert back == {"prompt": TEXT}

    with_server(test)


def test_token_texts(with_server, tokenizer):
    async def test(server):
        told = (await server.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
        assert told["token_strs"] == [tokenizer.token_text(token) for token in told["tokens"]]

    with_server(test)


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"enable_thinking": False}}], ids=str
)
def test_messages_are_those_of_a_chat(with_server, options):
    async def test(server):
        told = (await server.http.post("/tokenize", json={"messages": HI, **options})).json()
        await server.chat(messages=HI, max_tokens=1, **options)
        assert told["tokens"] == list(server.engine.submitted[-1].prompt_ids)

    with_server(test)


def test_a_text_longer_than_the_context_is_counted(with_server):
    async def test(server):
        told = (await server.http.post("/tokenize", json={"prompt": "word " * 3000})).json()
        assert told["count"] > 3000
        assert told["max_model_len"] == 200

    with_server(test)


@pytest.mark.parametrize(
    "path, body, status, param, words",
    [
        ("/tokenize", {}, 400, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model", "not served"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt", "string"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least 1"),
        ("/tokenize", {"prompt": "a", "typo": 1}, 400, "typo", "unknown parameter"),
        ("/detokenize", {"tokens": [301]}, 400, "tokens", "ids from 0 to 300"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token id -1"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "list"),
        ("/detokenize", {}, 400, "tokens", "required"),
    ],
    ids=str,
)
def test_refused_by_name(with_server, path, body, status, param, words):
    async def test(server):
        assert words in check_error(await server.http.post(path, json=body), status, param)

    with_server(test)
