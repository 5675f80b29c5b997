"""Bad input gets a status, the name of the parameter, and words that help; in OpenAI's shape, always."""

from __future__ import annotations

import json

import pytest

from tests.http.conftest import MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

# (endpoint, parameter, value, status, param of the error, words in its message)
REFUSALS = [
    (CHAT, "model", "gpt-4", 404, "model", "ask for 'tiny'"),
    (CHAT, "model", None, 400, "model", "required"),
    (CHAT, "temperature", 2.5, 400, "temperature", "from 0 to 2"),
    (CHAT, "temperature", "hot", 400, "temperature", "number"),
    (CHAT, "top_p", 0, 400, "top_p", "above 0"),
    (CHAT, "top_k", -2, 400, "top_k", "no limit"),
    (CHAT, "top_k", 1.5, 400, "top_k", "integer"),
    (CHAT, "min_p", 2, 400, "min_p", "from 0 to 1"),
    (CHAT, "seed", -1, 400, "seed", "from 0 to"),
    (CHAT, "seed", 2**70, 400, "seed", "from 0 to"),
    (CHAT, "max_tokens", -1, 400, "max_tokens", "at least 0"),
    (CHAT, "max_tokens", True, 400, "max_tokens", "integer"),
    (CHAT, "max_tokens", 1000, 400, "max_tokens", "context of 200 tokens"),
    (CHAT, "max_completion_tokens", 1000, 400, "max_tokens", "context of 200 tokens"),
    (CHAT, "min_tokens", 500, 400, "min_tokens", "at most"),
    (CHAT, "stop", [""], 400, "stop", "non-empty"),
    (CHAT, "stop", ["a"] * 17, 400, "stop", "at most 16"),
    (CHAT, "stop", [1], 400, "stop", "string"),
    (CHAT, "stop_token_ids", [301], 400, "stop_token_ids", "ids from 0 to 300"),
    (CHAT, "stream", "yes", 400, "stream", "boolean"),
    (CHAT, "stream_options", {"include_usage": True}, 400, "stream_options", "stream=true"),
    (CHAT, "n", 0, 400, "n", "greater than or equal to 1"),
    (CHAT, "n", 9, 400, "n", "from 1 to 8"),
    (CHAT, "n", True, 400, "n", "integer"),
    (CHAT, "logprobs", 3, 400, "logprobs", "boolean"),
    (CHAT, "top_logprobs", 3, 400, "top_logprobs", "logprobs=true"),
    (CHAT, "top_logprobs", 21, 400, "top_logprobs", "from 0 to 20"),
    (CHAT, "presence_penalty", 2.5, 400, "presence_penalty", "from -2 to 2"),
    (CHAT, "frequency_penalty", -3, 400, "frequency_penalty", "from -2 to 2"),
    (CHAT, "repetition_penalty", 0, 400, "repetition_penalty", "from 0.01 to 100"),
    (CHAT, "logit_bias", {"5": 101}, 400, "logit_bias", "token 5 is 101"),
    (CHAT, "logit_bias", {"301": 1}, 400, "logit_bias", "token id 301; the model has ids from 0 to 300"),
    (CHAT, "logit_bias", {"fox": 1}, 400, "logit_bias", "keys are token ids"),
    (CHAT, "logit_bias", {"05": 1}, 400, "logit_bias", "keys are token ids"),
    (CHAT, "logit_bias", {"-1": 1}, 400, "logit_bias", "keys are token ids"),
    (CHAT, "logit_bias", {"5": "much"}, 400, "logit_bias", "number"),
    (CHAT, "logit_bias", {str(token): 1 for token in range(1025)}, 400, "logit_bias", "at most 1024"),
    (CHAT, "priority", 2**31, 400, "priority", "from -2147483647"),
    (CHAT, "priority", "high", 400, "priority", "integer"),
    (CHAT, "cache_salt", "", 400, "cache_salt", "at least 1 character"),
    (CHAT, "cache_salt", "x" * 257, 400, "cache_salt", "at most 256"),
    (CHAT, "truncate_prompt_tokens", 0, 400, "truncate_prompt_tokens", "greater than or equal to 1"),
    (CHAT, "use_beam_search", True, 400, "use_beam_search", "not supported"),
    (CHAT, "spaces_between_special_tokens", False, 400, "spaces_between_special_tokens", "not supported"),
    (CHAT, "echo", True, 400, "echo", "not supported yet"),
    (CHAT, "chat_template", "{{ messages }}", 400, "chat_template", "those of the checkpoint"),
    (CHAT, "chat_template_kwargs", [], 400, "chat_template_kwargs", "dictionary"),
    (CHAT, "chat_template_kwargs", {"messages": []}, 400, "chat_template_kwargs", "the name has a meaning"),
    (
        CHAT,
        "messages",
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}],
            }
        ],
        400,
        "messages",
        'messages.0.content: a part of type "image_url" is not supported',
    ),
    (TEXT, "n", 1000, 400, "n", "from 1 to 8"),
    (TEXT, "prompt", [[]] * 65_537, 400, "prompt", "65537 prompts; allowed is: at most 65536"),
    (
        CHAT,
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}],
        400,
        "messages.0.content.0.cache_control",
        "unknown parameter: messages.0.content.0.cache_control",
    ),
    (CHAT, "messages", [{"role": "user", "content": ["a"]}], 400, "messages", "dictionary"),
    (TEXT, "stop[]", 1, 400, "stop[]", "unknown parameter: stop[]"),
    (TEXT, "stop", [5], 400, "stop", "stop.0: Input should be a valid string"),
    (CHAT, "continue_final_message", True, 400, "continue_final_message", "add_generation_prompt=false"),
    (CHAT, "response_format", {"type": "json_object"}, 400, "response_format", "not supported yet"),
    (CHAT, "tools", [{"type": "function"}], 400, "tools", "not supported yet"),
    (CHAT, "tool_choice", "required", 400, "tool_choice", "not supported yet"),
    (CHAT, "functions", [{}], 400, "functions", "not supported yet"),
    (CHAT, "modalities", ["audio"], 400, "modalities", "not supported yet"),
    (CHAT, "service_tier", "flex", 400, "service_tier", "not supported yet"),
    (CHAT, "reasoning_effort", "high", 400, "reasoning_effort", "unknown parameter"),
    (CHAT, "best_of", 1, 400, "best_of", "unknown parameter"),
    (CHAT, "typo", None, 400, "typo", "unknown parameter"),
    (CHAT, "messages", None, 400, "messages", "required"),
    (CHAT, "messages", [], 400, "messages", "at least 1"),
    (CHAT, "messages", "hi", 400, "messages", "list"),
    (CHAT, "messages", [{"role": "user"}], 400, "messages", "required"),
    (CHAT, "messages", [{"role": "tool", "content": "x"}], 400, "messages", "'assistant'"),
    (CHAT, "messages", [{"role": "user", "content": 5}], 400, "messages", "string"),
    (CHAT, "messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}], 400, "messages", "not supported"),
    (CHAT, "messages", [{"role": "user", "content": "word " * 300}], 400, "prompt", "holds 200"),
    (TEXT, "prompt", None, 400, "prompt", "required"),
    (TEXT, "prompt", "", 400, "prompt", "no tokens"),
    (TEXT, "prompt", [], 400, "prompt", "0 prompts"),
    (TEXT, "prompt", [[]], 400, "prompt", "no tokens"),
    (TEXT, "prompt", ["a"] * 9, 400, "prompt", "allowed are 1 to 8"),
    (TEXT, "prompt", [5, "a"], 400, "prompt", "string"),
    (TEXT, "prompt", [301], 400, "prompt", "ids from 0 to 300"),
    (TEXT, "prompt", [-1], 400, "prompt", "token id -1"),
    (TEXT, "prompt", [5] * 200, 400, "prompt", "200 tokens"),
    (TEXT, "prompt", [5] * 190, 400, "max_tokens", "at most 10 tokens"),
    (TEXT, "best_of", 2, 400, "best_of", "ask for n=2 and logprobs"),
    (TEXT, "max_tokens", -1, 400, "max_tokens", "at least 0"),
    (TEXT, "logprobs", 21, 400, "logprobs", "from 0 to 20"),
    (TEXT, "logprobs", True, 400, "logprobs", "integer"),
    (TEXT, "echo", 1, 400, "echo", "boolean"),
    (TEXT, "suffix", "end", 400, "suffix", "gaps are not filled"),
    (TEXT, "messages", HI, 400, "messages", "unknown parameter"),
]


def check_error(response, status: int, param: str | None = None) -> str:
    """The message, after a look at the shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    [(name, error)] = response.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refused_by_name(with_server, stream):
    async def test(server):
        for path, param, value, status, named, words in REFUSALS:
            body = {"model": MODEL, "stream": stream, "messages" if path == CHAT else "prompt": HI}
            if path == TEXT:
                body["prompt"] = "hi"
            response = await server.http.post(path, json=body | {param: value})
            if param == "stream_options" and stream:
                assert response.status_code == 200
                continue
            message = check_error(response, status, named)
            assert words in message, (param, value, message)
        refused = len(REFUSALS) - stream
        assert await server.metric("surefoot_requests_total", outcome="refused") == refused
        assert len(server.engine.submitted) == len(REFUSALS) - refused

    with_server(test)


def test_prompt_logprobs_are_refused_out_of_range_and_in_a_stream(with_server):
    async def test(server):
        assert "from 0 to 20" in check_error(await server.chat(prompt_logprobs=21), 400, "prompt_logprobs")
        refused = await server.complete(prompt_logprobs=1, stream=True)
        assert "leave out stream" in check_error(refused, 400, "prompt_logprobs")

    with_server(test)


def test_two_different_limits_are_refused(with_server):
    async def test(server):
        message = check_error(await server.chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens")
        assert "5" in message
        assert "6" in message

    with_server(test)


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"model": ', "not valid JSON: Expecting value at position 10"),
        (b"", "JSON object"),
        (b"[1]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b'{"model": "t\xc3"}', "byte 12 is not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"model": "tiny"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (b'{"metadata": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 deep"),
        (b'{"a":' * 100_000, "nested more than 64 deep"),
        (b'{"model": "tiny", "model": "tiny"}', "'model' stands twice"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "prompt: lone surrogate at character 0"),
        (b'{"model": "\\ud800", "prompt": "a"}', "model: lone surrogate at character 0"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "half a character"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"\\ud800": 1}}', "half a character"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"model": "tiny", "prompt": "a", "metadata": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1e999}}', "logit_bias"),
        (b'{"model": "tiny", "prompt": [1' + b"0" * 400 + b"]}", "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_not_what_they_should_be(with_server, body, words):
    async def test(server):
        response = await server.http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]

    with_server(test)


def test_a_body_without_content_type_is_told_so(with_server):
    async def test(server):
        content = json.dumps({"model": MODEL, "prompt": "a"})
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        message = check_error(await server.http.post(TEXT, content=content, headers=headers), 400)
        assert "Content-Type: application/json" in message

    with_server(test)


def test_a_body_too_large(with_server):
    limit = 1 << 20

    async def in_chunks():
        for _ in range(5):
            yield b" " * (limit // 4)

    async def test(server):
        headers = {"Content-Type": "application/json"}
        too_large = b" " * (limit + 1)
        message = check_error(await server.http.post(TEXT, content=too_large, headers=headers), 413)
        assert f"larger than {limit} bytes" in message
        assert "larger" in check_error(await server.http.post(TEXT, content=in_chunks(), headers=headers), 413)
        just_fits = b'{"model": "tiny", "prompt": "a"}'.ljust(limit)
        assert (await server.http.post(TEXT, content=just_fits, headers=headers)).status_code == 200

    with_server(test, max_body_bytes=limit)


def test_paths_and_methods(with_server):
    async def test(server):
        check_error(await server.http.get("/v1/nothing"), 404)
        check_error(await server.http.get(CHAT), 405)
        check_error(await server.http.get("/v1/models/other"), 404, "model")

    with_server(test)


@pytest.mark.parametrize("header", [None, "secret", "Bearer wrong", "Basic secret", "Bearer secret ", "Bearer é"])
def test_a_wrong_key(with_server, header):
    async def test(server):
        headers = {} if header is None else {"Authorization": header.encode()}
        for path in (CHAT, TEXT):
            response = await server.http.post(path, content=b"not even JSON", headers=headers)
            assert "Authorization" in check_error(response, 401)
        for path in ("/v1/models", "/plan", "/openapi.json", "/nothing"):
            check_error(await server.http.get(path, headers=headers), 401)
        for path in ("/tokenize", "/detokenize", "/v1/tokenize"):
            check_error(await server.http.post(path, json={}, headers=headers), 401)
        for path in ("/", "/health", "/ready", "/version", "/metrics", "/metrics/vllm", "/metrics/sglang"):
            assert (await server.http.get(path, headers=headers)).status_code == 200

    with_server(test, api_key="secret")


def test_the_right_key(with_server):
    async def test(server):
        server.http.headers["Authorization"] = "Bearer secret"
        assert (await server.chat()).status_code == 200

    with_server(test, api_key="secret")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_full_queue_is_a_503_before_any_event(with_server, stream):
    async def test(server):
        response = await server.chat(stream=stream)
        assert "wait already" in check_error(response, 503)
        assert response.headers["retry-after"] == "1"
        assert server.engine.aborted == []

    with_server(test, places=0)


def test_if_one_prompt_is_refused_the_others_are_aborted(with_server):
    async def test(server):
        server.engine.runs.clear()
        check_error(await server.complete(prompt=["a", "b", "c"]), 503)
        first, second, _ = (request.id for request in server.engine.submitted)
        assert server.engine.aborted == [first, second]

    with_server(test, places=2)


def test_before_the_engine_is_ready(with_server):
    async def test(server):
        assert (await server.http.get("/health")).status_code == 200
        ready = await server.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        response = await server.chat()
        assert "loading" in check_error(response, 503)
        assert int(response.headers["retry-after"]) > 0

    with_server(test, ready=False)


def test_an_unforeseen_error_is_a_500_in_the_same_shape(with_server, monkeypatch):
    async def test(server):
        def fail(*args):
            raise KeyError("a bug")

        monkeypatch.setattr(server.client, "new_id", fail)
        response = await server.chat()
        message = check_error(response, 500)
        assert "a bug" not in message
        assert response.headers["x-request-id"]
        assert await server.metric("surefoot_requests_total", outcome="failed") == 1

    with_server(test)
