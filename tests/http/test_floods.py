"""What one client sends neither stops the others nor comes back in full."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pydantic import ValidationError

from surefoot.http.json_body import InvalidJson, parse
from surefoot.http.openai_schema import Body, ChatBody, CompletionBody, DetokenizeBody
from surefoot.http.turns import LONG_SIZE, OneLongAtATime

MANY = 20_000
TEXT, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


@pytest.mark.parametrize(
    "body, fields",
    [
        (CompletionBody, {"prompt": [1] * MANY + ["a"]}),
        (CompletionBody, {"prompt": [True] * MANY}),
        (CompletionBody, {"prompt": [[1, None]] * MANY}),
        (CompletionBody, {"prompt": "x", "stop": [5] * MANY}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": [""] * MANY}),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        (CompletionBody, {"prompt": "x", **dict.fromkeys(map(str, range(MANY)), 1)}),
        (ChatBody, {"messages": [{"role": "x"}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}] * MANY}]}),
        (DetokenizeBody, {"tokens": [""] * MANY}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 5 else None,
)
def test_of_many_wrong_elements_few_become_errors(body: type[Body], fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"model": "tiny", **fields})
    assert caught.value.error_count() < 10


def test_a_name_that_stands_twice_is_found_in_one_pass() -> None:
    names = [str(number) for number in range(300_000)]
    with pytest.raises(InvalidJson, match="'x' stands twice"):
        parse(json.dumps({"user": dict.fromkeys(names, 1)}).replace("}}", ', "x": 1, "x": 2}}').encode())


@pytest.mark.parametrize(
    "body",
    [{"x" * 100_000: 1}, {"model": "m" * 100_000}, {"seed": -(10**4000)}, {"stop": ["s" * 50_000] * 20}],
    ids=lambda body: next(iter(body))[:5],
)
def test_a_refusal_quotes_little(with_server, caplog, body):
    async def test(server):
        response = await server.complete(**body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 2_000
        assert max(map(len, caplog.messages)) < 2_000

    caplog.set_level("INFO")
    with_server(test)


def test_lines_of_a_stream_are_lines_for_python(with_server):
    text = "a\u2028b\u2029c\x85d"

    async def test(server):
        response = await server.complete(prompt=text, echo=True, stream=True, max_tokens=1)
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        assert json.loads(events[0])["choices"][0]["text"] == text

    with_server(test)


def test_what_is_tokenized_has_an_end(with_server):
    async def test(server):
        longest = 1 << 20
        assert (await server.post(TOKENIZE, prompt="a " * (longest // 2))).json()["count"] > 1000
        for path, body in (
            (TOKENIZE, {"prompt": "a" * (longest + 1)}),
            (TOKENIZE, {"messages": [{"role": "user", "content": "a" * (longest + 1)}]}),
            (DETOKENIZE, {"tokens": [5] * (longest + 1)}),
            (TEXT, {"prompt": "a" * (longest + 1), "truncate_prompt_tokens": 1}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * (longest + 1)}], "truncate_prompt_tokens": 1}),
        ):
            error = (await server.post(path, **body)).json()["error"]
            assert f"allowed are at most {longest}" in error["message"]
            assert error["param"] in body

    with_server(test)


def test_of_long_work_one_runs_at_a_time_and_short_work_passes_it() -> None:
    running: list[int] = []
    goes_on = threading.Event()

    def long_work(number: int) -> int:
        running.append(number)
        assert goes_on.wait(20)
        assert running.pop() == number  # nobody came between
        return number

    async def test() -> None:
        turns = OneLongAtATime()
        waiting = [asyncio.create_task(turns.in_turn(LONG_SIZE + 1, lambda at=at: long_work(at))) for at in range(3)]
        while not running:
            await asyncio.sleep(0)
        for size in (1, LONG_SIZE):
            assert await turns.in_turn(size, lambda: list(running)) == [0]
        goes_on.set()
        assert await asyncio.gather(*waiting) == [0, 1, 2]

    asyncio.run(test())
