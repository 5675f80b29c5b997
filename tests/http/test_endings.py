"""Every request ends exactly once: when the client leaves, the engine dies, a row fails, or the server drains."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.http.conftest import ANSWER, MODEL
from tests.http.sse import DONE, chat_text, completion_text, events, reasons
from tests.http.test_refusals import check_error

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def call(app, body: dict, leave: asyncio.Event, seconds_per_message: float = 0) -> list[dict]:
    """One raw ASGI request, whose client disconnects when `leave` is set. Returns what was sent to it."""
    content = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(seconds_per_message)
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http", "server": ("server", 80)}
    await app(scope, receive, send)
    return sent


@BOTH
def test_a_client_that_leaves_while_tokens_come(with_server, stream):
    async def test(server):
        leave = asyncio.Event()
        request = asyncio.create_task(call(server.app, {"stream": stream}, leave))
        await until(lambda: server.engine.tokens_sent > 3)
        leave.set()
        await request
        assert server.engine.aborted == [server.engine.submitted[0].id]
        assert await server.metric("surefoot_requests_total", outcome="client_left") == 1
        await server.client.wait_idle(1)

    with_server(test)


@BOTH
def test_a_client_that_leaves_before_the_first_token(with_server, stream):
    async def test(server):
        server.engine.runs.clear()
        leave = asyncio.Event()
        request = asyncio.create_task(call(server.app, {"stream": stream}, leave))
        await until(lambda: server.engine.submitted)
        leave.set()
        await request
        assert server.engine.aborted == [server.engine.submitted[0].id]

    with_server(test)


def test_a_cancelled_handler_aborts_too(with_server):
    async def test(server):
        request = asyncio.create_task(call(server.app, {"stream": True}, asyncio.Event()))
        await until(lambda: server.engine.tokens_sent > 3)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert server.engine.aborted == [server.engine.submitted[0].id]

    with_server(test)


def test_a_finished_request_is_not_aborted(with_server):
    async def test(server):
        await server.chat()
        await server.chat(stream=True)
        assert server.engine.aborted == []

    with_server(test)


@BOTH
def test_the_engine_dies(with_server, stream):
    async def test(server):
        requests = [asyncio.create_task(server.chat(stream=stream)) for _ in range(3)]
        await until(lambda: server.engine.tokens_sent > 10)
        server.engine.runs.clear()
        server.client.engine_died("it was killed by SIGKILL", restarting=True)
        for response in await asyncio.gather(*requests):
            if stream:
                *chunks, last = events(response.text)
                assert ANSWER.startswith(chat_text(chunks))
                assert chat_text(chunks)
                assert reasons(chunks) == []
                assert "SIGKILL" in last["error"]["message"]
                assert last["error"]["type"] == "server_error"
                assert DONE not in chunks
            else:
                assert "SIGKILL" in check_error(response, 500)
        assert server.engine.aborted == []  # nobody is there to hear it
        assert await server.metric("surefoot_requests_total", outcome="failed") == 3

        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/ready")).json()["status"] == "restarting"
        refused = await server.chat(stream=stream)
        assert "SIGKILL" in check_error(refused, 503)
        assert refused.headers["retry-after"]

        server.engine.die()
        server.engine.runs.set()
        server.engine.ready()
        await until(lambda: server.client.state == "ready")
        assert (await server.chat()).json()["choices"][0]["message"]["content"] == ANSWER

    with_server(test)


def test_an_engine_that_is_not_restarted_makes_the_server_unhealthy(with_server):
    async def test(server):
        server.client.engine_died("exit code 3", restarting=False)
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["detail"]) == (503, "the engine died: exit code 3")

    with_server(test)


def test_death_before_the_engine_has_accepted(with_server):
    async def test(server):
        server.engine.hears = False
        request = asyncio.create_task(server.chat(stream=True))
        await asyncio.sleep(0.05)
        server.client.engine_died("gone", restarting=False)
        check_error(await request, 503)

    with_server(test)


@BOTH
def test_a_request_that_fails_in_the_engine(with_server, tokenizer, stream):
    """Its row gives no finite logits after three tokens; the others live on."""
    broken = tokenizer.encode("fox", add_special_tokens=False)

    async def test(server):
        bad, good = await asyncio.gather(
            server.complete(prompt="bad", max_tokens=20, stream=stream), server.complete(prompt="good", max_tokens=16)
        )
        assert good.json()["choices"][0]["finish_reason"] == "length"
        if stream:
            *chunks, last = events(bad.text)
            assert completion_text(chunks) == "fox"
            assert "no finite logits" in last["error"]["message"]
        else:
            assert "no finite logits" in check_error(bad, 500)

    def script(request):
        return broken if request.max_new_tokens == 20 else broken * 16

    with_server(test, script=script)


def test_drain_lets_running_requests_finish(with_server):
    async def test(server):
        request = asyncio.create_task(server.chat())
        await until(lambda: server.engine.tokens_sent > 3)
        server.client.begin_drain()
        assert "shutting down" in check_error(await server.chat(), 503)
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        await server.client.wait_idle(10)
        assert (await request).json()["choices"][0]["message"]["content"] == ANSWER
        assert server.engine.aborted == []

    with_server(test)


@BOTH
def test_drain_ends_what_takes_too_long(with_server, stream):
    async def test(server):
        request = asyncio.create_task(server.chat(stream=stream))
        await until(lambda: server.engine.tokens_sent > 3)
        server.engine.runs.clear()
        server.client.begin_drain()
        await server.client.wait_idle(0.05)
        response = await request
        if stream:
            assert "shutting down" in events(response.text)[-1]["error"]["message"]
        else:
            assert "shutting down" in check_error(response, 500)
        assert server.engine.aborted == [server.engine.submitted[0].id]

    with_server(test)


def test_the_engine_dies_after_a_stop_string(with_server):
    """The answer is complete: only the count of cached tokens is not known."""

    async def test(server):
        request = asyncio.create_task(server.chat(stop="fox"))
        await until(lambda: server.engine.tokens_sent > 3)
        server.engine.hears = False
        await until(lambda: server.engine.tokens_sent > 40)
        server.engine.runs.clear()
        server.client.engine_died("gone", restarting=False)
        answer = (await request).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] == ANSWER[: ANSWER.index("fox")]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    with_server(test)


def test_random_arrivals_departures_and_deaths_leave_nothing_behind(with_server):
    """Every response is whole, or one error; the engine is told of each request that did not end by itself."""
    generator = random.Random(6)

    async def one(server, delay: float, stream: bool, stop: list[str]) -> None:
        leave = asyncio.Event()
        asyncio.get_running_loop().call_later(delay, leave.set)
        sent = await call(server.app, {"stream": stream, "stop": stop}, leave)
        text = b"".join(message.get("body", b"") for message in sent).decode()
        is_complete = bool(sent) and sent[-1].get("more_body") is not True and sent[-1]["type"] == "http.response.body"
        if is_complete and stream and sent[0]["status"] == 200:
            assert text.count(DONE) + text.count('{"error"') == 1
        elif is_complete:
            assert ("error" in json.loads(text)) == (sent[0]["status"] != 200)

    async def test(server):
        for _ in range(6):
            tasks = [
                asyncio.create_task(
                    one(server, generator.uniform(0, 0.2), generator.random() < 0.5, generator.choice([[], ["fox"]]))
                )
                for _ in range(12)
            ]
            if generator.random() < 0.5:
                await asyncio.sleep(generator.uniform(0, 0.1))
                server.client.engine_died("a test", restarting=True)
                server.engine.die()
                server.engine.ready()
            await asyncio.gather(*tasks)
            await server.client.wait_idle(1)
            await until(lambda: server.engine.is_idle)
            await until(lambda: server.client.state == "ready")

    with_server(test)


def test_tokens_that_came_together_are_one_event(with_server):
    """A client that reads slowly gets fewer, larger events, and all the text."""

    async def test(server):
        sent = await call(server.app, {"stream": True}, asyncio.Event(), seconds_per_message=0.02)
        *chunks, done = events(b"".join(message.get("body", b"") for message in sent).decode())
        assert (chat_text(chunks), done) == (ANSWER, DONE)
        assert len(chunks) < 30  # for 64 tokens

    with_server(test)
