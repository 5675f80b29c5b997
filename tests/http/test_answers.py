"""What a client gets when all goes well: whole and streamed, for chats and texts."""

from __future__ import annotations

import asyncio

import pytest

from surefoot import __version__
from tests.http.conftest import ANSWER, MODEL, answers
from tests.http.fake_engine import CACHED_TOKENS, PATH
from tests.http.sse import DONE, chat_text, completion_text, events, reasons

ANSWER_TOKENS = 63


def test_chat(with_server, tokenizer):
    async def test(server):
        response = await server.chat()
        assert response.status_code == 200
        answer = response.json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == MODEL
        assert answer["id"].startswith("chatcmpl-")
        [choice] = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop"
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        [request] = server.engine.submitted
        assert list(request.prompt_ids) == prompt_ids
        assert request.max_new_tokens == 200 - len(prompt_ids)  # the rest of the context
        assert answer["usage"] == {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": ANSWER_TOKENS + 1,  # the stop id counts
            "total_tokens": len(prompt_ids) + ANSWER_TOKENS + 1,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }

    with_server(test)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 9}, {"stop": "fox"}, {"stop": ["👋 from", "zzz"]}, {"stop": " the"}, {"stop_token_ids": [70]}],
    ids=str,
)
def test_streamed_text_is_the_whole_text(with_server, options):
    async def test(server):
        whole = (await server.chat(**options)).json()
        response = await server.chat(stream=True, stream_options={"include_usage": True}, **options)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response.text)
        assert done == DONE
        assert chat_text(chunks) == whole["choices"][0]["message"]["content"]
        assert reasons(chunks) == [whole["choices"][0]["finish_reason"]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        *others, last = chunks
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in others)

    with_server(test)


def test_usage_is_streamed_only_on_request(with_server):
    async def test(server):
        *chunks, done = events((await server.complete(stream=True)).text)
        assert done == DONE
        assert all("usage" not in chunk for chunk in chunks)

    with_server(test)


def test_a_stop_string_ends_text_usage_and_engine(with_server, tokenizer):
    async def test(server):
        answer = (await server.chat(stop=[" from"])).json()
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "Grüße 👋"
        assert choice["finish_reason"] == "stop"
        counted = len(tokenizer.encode("Grüße 👋 from", add_special_tokens=False))
        assert answer["usage"]["completion_tokens"] == counted
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS
        assert server.engine.aborted == [server.engine.submitted[0].id]
        assert server.engine.tokens_sent < ANSWER_TOKENS

    with_server(test)


def test_a_stop_string_in_the_last_token_needs_no_abort(with_server):
    async def test(server):
        [choice] = (await server.chat(stop=["G"], max_tokens=1)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        assert server.engine.aborted == []

    with_server(test)


def test_text_completion_has_16_tokens_by_default(with_server):
    async def test(server):
        answer = (await server.complete()).json()
        assert answer["object"] == "text_completion"
        assert answer["usage"]["completion_tokens"] == 16
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Grüße 👋 from", "length")

    with_server(test)


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("the quick", ["the quick"]),
        (["the", "fox"], ["the", "fox"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_each_prompt_is_a_choice(with_server, tokenizer, prompt, expected):
    def script(request):
        return [*request.prompt_ids, tokenizer.eos_ids[0]]  # an echo shows which choice is which

    async def test(server):
        answer = (await server.complete(prompt=prompt)).json()
        ids = [tokenizer.encode(each, True) if isinstance(each, str) else each for each in expected]
        texts = [tokenizer.decode(each) for each in ids]
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == sum(map(len, ids)) + len(ids)
        *chunks, done = events((await server.complete(prompt=prompt, stream=True)).text)
        assert done == DONE
        assert [completion_text(chunks, index) for index in range(len(texts))] == texts
        assert [reasons(chunks, index) for index in range(len(texts))] == [["stop"]] * len(texts)

    with_server(test, script=script)


def test_parameters_reach_the_engine(with_server):
    async def test(server):
        options = {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.25, "seed": 12, "min_tokens": 3}
        await server.complete(max_tokens=5, ignore_eos=True, stop_token_ids=[9], **options)
        [request] = server.engine.submitted
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
        assert (sampling.min_p, sampling.seed) == (0.25, 12)
        assert (request.min_new_tokens, request.max_new_tokens, request.stop_ids) == (3, 5, (9,))

    with_server(test)


def test_requests_without_a_seed_draw_differently(with_server):
    async def test(server):
        await server.complete(prompt=["a", "a"])
        await server.complete(prompt="a")
        assert len({request.sampling.seed for request in server.engine.submitted}) == 3

    with_server(test)


@pytest.mark.parametrize(
    "neutral",
    [
        {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "default", "parallel_tool_calls": True},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0},
        dict.fromkeys(["temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "stream", "stream_options"]),
        dict.fromkeys(["tools", "tool_choice", "logit_bias", "logprobs", "n", "response_format", "user"]),
        {"max_tokens": 100, "max_completion_tokens": 100},
    ],
    ids=lambda neutral: next(iter(neutral)),
)
def test_neutral_values_change_nothing(with_server, neutral):
    async def test(server):
        response = await server.chat(**neutral)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == ANSWER

    with_server(test)


def test_messages_in_all_their_forms(with_server, tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
    ]

    async def test(server):
        assert (await server.chat(messages=messages, add_generation_prompt=False)).status_code == 200
        prompt = tokenizer.decode(list(server.engine.submitted[0].prompt_ids), skip_special_tokens=False)
        assert prompt == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none two<|im_end|>\n"
            "<|im_start|>assistant\nthree<|im_end|>\n"
        )

    with_server(test)


def test_many_at_once(with_server):
    async def test(server):
        responses = await asyncio.gather(*(server.chat() for _ in range(8)))
        assert {r.json()["choices"][0]["message"]["content"] for r in responses} == {ANSWER}

    with_server(test)


def test_metrics_add_up(with_server):
    async def test(server):
        first = (await server.chat()).json()["usage"]
        await server.complete(stream=True)
        await server.complete(temperature=9)
        assert await server.metric("surefoot_requests_total", outcome="completed") == 2
        assert await server.metric("surefoot_requests_total", outcome="refused") == 1
        assert await server.metric("surefoot_generation_tokens_total") == first["completion_tokens"] + 16
        prompt_tokens = sum(len(request.prompt_ids) for request in server.engine.submitted)
        assert await server.metric("surefoot_prompt_tokens_total") == prompt_tokens
        assert await server.metric("surefoot_prompt_tokens_cached_total") == 2 * CACHED_TOKENS
        assert await server.metric("surefoot_steps_total", path=PATH) == first["completion_tokens"] + 16
        assert await server.metric("surefoot_num_requests_running") == 0
        assert await server.metric("surefoot_kv_pages", group="0") == 100
        assert await server.metric("surefoot_kv_pages_free", group="1") == 8
        assert await server.metric("surefoot_kv_pages_cached", group="0") == 30
        assert await server.metric("surefoot_kv_cache_usage_perc") == pytest.approx(0.2)  # of the fuller group
        assert await server.metric("surefoot_num_preemptions_total") == 5
        assert await server.metric("surefoot_prefix_cache_hits_total") == 30
        assert await server.metric("surefoot_prefix_cache_queries_total") == 120
        assert await server.metric("surefoot_engine_restarts_total") == 0
        assert await server.metric("surefoot_request_success_total", finished_reason="stop") == 1
        assert await server.metric("surefoot_request_success_total", finished_reason="length") == 1
        assert await server.metric("surefoot_time_to_first_token_seconds_count") == 2
        assert await server.metric("surefoot_e2e_request_latency_seconds_count") == 2
        assert await server.metric("surefoot_request_time_per_output_token_seconds_count") == 2
        assert await server.metric("surefoot_request_generation_tokens_sum") == first["completion_tokens"] + 16
        assert await server.metric("surefoot_request_prompt_tokens_sum") == prompt_tokens
        assert await server.metric("surefoot_inter_token_latency_seconds_count") > 20

    with_server(test)


def test_operations(with_server):
    async def test(server):
        assert (await server.http.get("/health")).json() == {"status": "ready"}
        assert (await server.http.get("/version")).json() == {"version": __version__}
        [model] = (await server.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 200)
        assert (await server.http.get(f"/v1/models/{MODEL}")).json() == model
        plan = await server.http.get("/plan")
        assert plan.json()["bounds"]["max_model_len"] == 200
        assert "secret" not in plan.text

    with_server(lambda server: _with_key(server, test), api_key="secret")


async def _with_key(server, test):
    server.http.headers["Authorization"] = "Bearer secret"
    await test(server)


def test_every_response_has_a_request_id(with_server):
    async def test(server):
        own = await server.http.get("/health", headers={"X-Request-Id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1"
        unfit = await server.http.get("/nowhere", headers={"X-Request-Id": "x" * 200})
        assert len(unfit.headers["x-request-id"]) == 32
        responses = [await server.chat(), await server.chat(stream=True), await server.chat(n=2)]
        assert len({response.headers["x-request-id"] for response in responses}) == 3

    with_server(test)


def test_one_line_is_logged_per_request(with_server, caplog):
    async def test(server):
        await server.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]}, headers={"X-Request-Id": "abc"}
        )

    with caplog.at_level("INFO", logger="surefoot.http"):
        with_server(test)
    [line] = [record.message for record in caplog.records if record.name == "surefoot.http"]
    assert line.startswith("abc /v1/completions completed: 3 prompt tokens (2 cached), 16 output tokens, ")
    assert line.endswith(" s, length")


def test_an_answer_may_be_empty(with_server, tokenizer):
    async def test(server):
        [choice] = (await server.chat()).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        *chunks, done = events((await server.chat(stream=True)).text)
        assert (chat_text(chunks), reasons(chunks), done) == ("", ["stop"], DONE)

    with_server(test, script=answers(tokenizer, ""))
