"""Choices of one prompt, logprobs, echoes: a stream adds up to the whole answer, in the documented shape."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from surefoot.frontend.sampling_params import sibling_seed
from surefoot.http.answer_schema import ChatChunk, ChatCompletion, TextCompletion
from tests.http.conftest import ANSWER, MODEL, answers
from tests.http.fake_engine import CACHED_TOKENS, told_logprob
from tests.http.sse import DONE, events
from tests.http.test_refusals import check_error

PROMPT = "the quick 👋"


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, put together as those of a whole answer."""
    made: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = made.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
        assert whole["finish_reason"] is None  # nothing comes after the end
        whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        whole["finish_reason"] = choice["finish_reason"]
        for name, told in (choice["logprobs"] or {}).items():
            if isinstance(told, list):
                whole["logprobs"].setdefault(name, []).extend(told)
    return [made[index] for index in sorted(made)]


def plain(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a whole answer, as `joined` gives them."""
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": {name: told for name, told in (choice["logprobs"] or {}).items() if told is not None},
            "finish_reason": choice["finish_reason"],
        }
        for choice in choices
    ]


STREAMED = [
    {},
    {"n": 3, "seed": 5},
    {"n": 2, "stop": "fox"},
    {"stop": ["👋 from"], "include_stop_str_in_output": True},
    {"skip_special_tokens": False, "include_stop_str_in_output": True},
    {"max_tokens": 9, "return_tokens_as_token_ids": True},
]


@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_a_chat_streamed_is_the_whole_chat(with_server, options):
    async def test(server):
        for wanted in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}):
            await check(server, options | wanted)

    async def check(server, asked):
        whole = (await server.chat(**asked)).json()
        ChatCompletion.model_validate(whole)
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = events((await server.chat(**asked, **streaming)).text)
        assert done == DONE
        for chunk in chunks:
            ChatChunk.model_validate(chunk)
        assert joined(chunks) == plain(whole["choices"])
        assert chunks[-1]["usage"] == whole["usage"]
        counts = [len(choice["logprobs"]["content"]) for choice in whole["choices"] if choice["logprobs"]]
        assert sum(counts) == (whole["usage"]["completion_tokens"] if asked.get("logprobs") else 0)

    with_server(test)


@pytest.mark.parametrize("options", [*STREAMED, {"max_tokens": 60, "prompt": [5, 1, 70]}], ids=str)
def test_a_text_streamed_is_the_whole_text(with_server, options):
    async def test(server):
        for echo, logprobs in itertools.product((False, True), (None, 0, 2)):
            asked = {"prompt": [PROMPT, "fox"], "max_tokens": 100, "logprobs": logprobs, "echo": echo}
            await check(server, asked | options)

    async def check(server, asked):
        whole = (await server.complete(**asked)).json()
        TextCompletion.model_validate(whole)
        *chunks, done = events((await server.complete(**asked, stream=True)).text)
        assert done == DONE
        for chunk in chunks:
            TextCompletion.model_validate(chunk)
        assert joined(chunks) == plain(whole["choices"])
        for choice in whole["choices"]:
            assert (choice["logprobs"] is None) == (asked["logprobs"] is None)
            if told := choice["logprobs"]:
                assert len({len(column) for column in told.values()}) == 1
                assert told["text_offset"] == sorted(told["text_offset"])
                assert all(offset <= len(choice["text"]) for offset in told["text_offset"])

    with_server(test)


def test_choices_are_numbered_by_prompt_and_differ_by_seed(with_server):
    def script(request):
        return [*request.prompt_ids, 10, 11, 2]

    async def test(server):
        answer = (await server.complete(prompt=[[5], [6]], n=3, seed=11)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
        requests = server.engine.submitted
        assert [request.prompt_ids for request in requests] == [(5,)] * 3 + [(6,)] * 3
        first, fourth = requests[0].id, requests[3].id
        assert [request.group_id for request in requests] == [first] * 3 + [fourth] * 3
        assert [request.sampling.seed for request in requests] == [11, sibling_seed(11, 1), sibling_seed(11, 2)] * 2
        assert answer["usage"]["prompt_tokens"] == 2  # a prompt counts once
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * CACHED_TOKENS
        assert answer["usage"]["completion_tokens"] == 6 * 4
        await server.complete(prompt=[[5], [6]], n=2)
        assert len({request.sampling.seed for request in server.engine.submitted[6:]}) == 4
        assert await server.metric("surefoot_request_params_n_sum") == 2 * 3 + 2 * 2

    with_server(test, script=script)


def test_one_choice_ends_by_a_stop_string_and_the_others_go_on(with_server, tokenizer):
    texts = ["a fox here", "the lazy dog", "quick fox"]

    def script(request):
        text = texts[request.id - request.group_id]
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]

    async def test(server):
        answer = (await server.chat(n=3, stop=" fox")).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "the lazy dog", "quick"]
        first, _, third = (request.id for request in server.engine.submitted)
        assert set(server.engine.aborted) <= {first, third}
        assert first in server.engine.aborted

    with_server(test, script=script)


def test_logprobs_of_a_chat(with_server, tokenizer):
    async def test(server):
        answer = (await server.chat(logprobs=True, top_logprobs=2, stop="👋")).json()
        [choice] = answer["choices"]
        content = choice["logprobs"]["content"]
        ids = tokenizer.encode("Grüße 👋", add_special_tokens=False)
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Grüße 👋"
        assert [entry["logprob"] for entry in content] == [told_logprob(token) for token in ids]
        for entry, token in zip(content, ids, strict=True):
            assert entry["token"] == tokenizer.token_text(token)
            assert [top["logprob"] for top in entry["top_logprobs"]] == [told_logprob(token, rank) for rank in (0, 1)]
            assert entry["top_logprobs"][1]["token"] == tokenizer.token_text((token + 1) % 301)

    with_server(test)


def test_logprobs_of_a_text_with_its_prompt(with_server, tokenizer):
    async def test(server):
        answer = (await server.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=3)).json()
        [choice] = answer["choices"]
        told = choice["logprobs"]
        prompt_ids = tokenizer.encode(PROMPT, add_special_tokens=True)
        ids = [*prompt_ids, *tokenizer.encode(ANSWER, add_special_tokens=False)[:3]]
        assert choice["text"] == PROMPT + tokenizer.decode(ids[len(prompt_ids) :])
        assert told["tokens"] == [tokenizer.token_text(token) for token in ids]
        assert told["token_logprobs"] == [None] + [told_logprob(token) for token in ids[1:]]
        assert told["top_logprobs"][0] is None
        assert told["top_logprobs"][1] == {told["tokens"][1]: told_logprob(ids[1])}
        for offset, next_offset, token in zip(
            told["text_offset"][:-1], told["text_offset"][1:], told["tokens"][:-1], strict=True
        ):
            if "\ufffd" not in token:
                assert choice["text"][offset:next_offset] == token
        assert answer["usage"]["completion_tokens"] == 3

    with_server(test)


def test_tokens_as_ids(with_server, tokenizer):
    async def test(server):
        asked = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        [choice] = (await server.complete(logprobs=1, **asked)).json()["choices"]
        first, second, *_ = tokenizer.encode(ANSWER, add_special_tokens=False)
        assert choice["logprobs"]["tokens"] == [f"token_id:{first}", f"token_id:{second}"]
        assert choice["logprobs"]["top_logprobs"][0] == {f"token_id:{first}": told_logprob(first)}
        [choice] = (await server.chat(logprobs=True, **asked)).json()["choices"]
        assert choice["logprobs"]["content"][1]["token"] == f"token_id:{second}"

    with_server(test)


def test_a_text_is_scored_without_output(with_server, tokenizer):
    async def test(server):
        answer = (await server.complete(prompt=[PROMPT, "fox"], echo=True, logprobs=0, max_tokens=0)).json()
        for choice, prompt in zip(answer["choices"], (PROMPT, "fox"), strict=True):
            ids = tokenizer.encode(prompt, add_special_tokens=True)
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
            assert choice["logprobs"]["token_logprobs"] == [None] + [told_logprob(token) for token in ids[1:]]
        assert answer["usage"]["completion_tokens"] == 0
        assert {request.max_new_tokens for request in server.engine.submitted} == {1}

    with_server(test)


def test_no_output_may_be_asked_for(with_server):
    """It fills the prefix cache."""

    async def test(server):
        for ask in (server.complete, server.chat):
            answer = (await ask(max_tokens=0)).json()
            [choice] = answer["choices"]
            assert choice.get("text", choice.get("message", {}).get("content")) == ""
            assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
            lines = (await ask(max_tokens=0, stream=True)).text.splitlines()
            *chunks, last = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            assert last["finish_reason"] == "length"
            assert not any(chunk.get("text") or chunk.get("delta", {}).get("content") for chunk in [*chunks, last])

    with_server(test)


def test_prompt_logprobs_as_vllm_tells_them(with_server, tokenizer):
    async def test(server):
        text = (await server.complete(prompt=PROMPT, prompt_logprobs=2, max_tokens=1)).json()
        TextCompletion.model_validate(text)
        ids = tokenizer.encode(PROMPT, add_special_tokens=True)
        first, *others = text["choices"][0]["prompt_logprobs"]
        assert first is None
        for token, told in zip(ids[1:], others, strict=True):
            assert told[str(token)] == {
                "logprob": told_logprob(token),
                "rank": 1,
                "decoded_token": tokenizer.token_text(token),
            }
            assert told[str((token + 1) % 301)]["rank"] == 2
        chat = (await server.chat(prompt_logprobs=0, max_tokens=0)).json()
        ChatCompletion.model_validate(chat)
        ids = server.engine.submitted[-1].prompt_ids
        assert len(chat["prompt_logprobs"]) == len(ids)
        assert chat["prompt_logprobs"][1] == {
            str(ids[1]): {
                "logprob": told_logprob(ids[1]),
                "rank": None,
                "decoded_token": tokenizer.token_text(ids[1]),
            }
        }
        assert chat["choices"][0]["message"]["content"] == ""

    with_server(test)


def test_an_improbable_token_has_a_number(with_server, monkeypatch):
    monkeypatch.setattr("tests.http.fake_engine.told_logprob", lambda token, rank=0: float("-inf"))

    async def test(server):
        [choice] = (await server.complete(logprobs=1, max_tokens=1)).json()["choices"]
        assert choice["logprobs"]["token_logprobs"] == [-9999.0]
        [choice] = (await server.chat(logprobs=True, max_tokens=1)).json()["choices"]
        assert choice["logprobs"]["content"][0]["logprob"] == -9999.0

    with_server(test)


@pytest.mark.parametrize("prompt, text", [([5, 2, 70], "<|im_end|>"), ("a<|im_end|>b", "a<|im_end|>b")], ids=str)
def test_an_echo_shows_special_tokens(with_server, prompt, text):
    async def test(server):
        [choice] = (await server.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)).json()["choices"]
        assert text in choice["text"]
        for offset, token in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)

    with_server(test)


def test_usage_in_every_chunk(with_server):
    async def test(server):
        options = {"continuous_usage_stats": True}
        *chunks, _ = events((await server.complete(stream=True, stream_options=options)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 16
        assert all(chunk["choices"] for chunk in chunks)  # include_usage asks for one without
        both = options | {"include_usage": True}
        *chunks, _ = events((await server.complete(stream=True, stream_options=both)).text)
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 16)

    with_server(test)


def test_what_was_asked_reaches_the_engine(with_server):
    async def test(server):
        await server.chat(
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": 3, "6": -100, "7": 0},
            priority=-4,
            cache_salt="tenant",
            max_tokens=1,
        )
        request = server.engine.submitted[-1]
        sampling = request.sampling
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.5, -0.5)
        assert sampling.logit_bias == ((5, 3.0), (6, -100.0))
        assert (request.priority, request.cache_namespace) == (-4, "tenant")
        await server.complete(best_of=2, n=2, suffix="", logit_bias={}, max_tokens=1)
        assert len(server.engine.submitted) == 3

    with_server(test)


def test_the_last_tokens_of_a_long_prompt(with_server, tokenizer):
    long_text = "word " * 300

    async def test(server):
        check_error(await server.complete(prompt=long_text), 400, "prompt")
        await server.complete(prompt=long_text, truncate_prompt_tokens=7, max_tokens=1)
        ids = tokenizer.encode(long_text, add_special_tokens=True)
        assert server.engine.submitted[-1].prompt_ids == tuple(ids[-7:])
        await server.complete(prompt=[5, 6, 7], truncate_prompt_tokens=2, max_tokens=1)
        assert server.engine.submitted[-1].prompt_ids == (6, 7)

    with_server(test)


def test_a_final_message_is_continued(with_server, tokenizer):
    async def test(server):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick "}]
        await server.chat(messages=messages, add_generation_prompt=False, continue_final_message=True, max_tokens=1)
        text = tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe quick "
        empty = [{"role": "assistant", "content": ""}]
        refused = await server.chat(messages=empty, add_generation_prompt=False, continue_final_message=True)
        check_error(refused, 400, "continue_final_message")

    with_server(test)


def test_an_engine_that_fails_while_choices_run(with_server, tokenizer):
    broken = tokenizer.encode("fox", add_special_tokens=False)

    async def test(server):
        check_error(await server.chat(n=2, logprobs=True), 500)
        assert await server.metric("surefoot_request_success_total", finished_reason="error") == 2

    with_server(test, script=lambda request: broken)


def test_the_model_is_named_as_asked(with_server):
    async def test(server):
        assert (await server.chat(n=2)).json()["model"] == MODEL

    with_server(test, script=answers_nothing)


def answers_nothing(request):
    return [2]


def test_empty_answers_have_empty_logprobs(with_server, tokenizer):
    async def test(server):
        asked = {"logprobs": True, "top_logprobs": 1, "skip_special_tokens": False}
        [choice] = (await server.chat(**asked)).json()["choices"]
        assert choice["message"]["content"] == ""
        [entry] = choice["logprobs"]["content"]  # the stop id counts
        assert entry["token"] == "<|im_end|>"
        *chunks, _ = events((await server.chat(stream=True, **asked)).text)
        assert joined(chunks) == plain([choice])

    with_server(test, script=answers(tokenizer, ""))
