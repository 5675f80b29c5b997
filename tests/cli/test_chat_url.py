"""`surefoot chat --url`: servers that break off, or that are none with the OpenAI API."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.commands.chat import Chat
from surefoot.commands.chat_models import RemoteModel
from tests.cli.terminal import Terminal

PIECE = b'data: {"choices": [{"delta": {"content": "He was"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
MODELS = JSON_HEAD + b'{"data": [{"id": "m"}]}'
CUT = b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n{"
NOT_OPENAI = "does not answer as the OpenAI API does"


@contextlib.contextmanager
def answering(*responses: bytes) -> Iterator[str]:
    """A server that sends these, whatever it is asked, each in a connection that it then closes."""

    def serve() -> None:
        for response in responses:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "header, body, is_whole",
    [
        ("", PIECE + DONE, True),
        ("", PIECE, False),
        ("", PIECE + PIECE[:20], False),
        ("Content-Length: 1000\r\n", PIECE, False),
        (CHUNKED, b"%x\r\n%s\r\n" % (len(PIECE), PIECE), False),
        (CHUNKED, b"%x\r\n%s" % (1000, PIECE), False),
    ],
    ids=["whole", "no end", "half an event", "short", "no last chunk", "half a chunk"],
)
def test_an_answer_that_breaks_off_is_no_answer(header: str, body: bytes, is_whole: bool) -> None:
    head = EVENTS_HEAD.removesuffix(b"\r\n") + header.encode() + b"\r\n"
    with answering(MODELS, head + body) as url:
        chat = Chat(RemoteModel(url, "", ""), {}, Console(stderr=True))
        with contextlib.nullcontext() if is_whole else pytest.raises(OSError, match="broke before the answer's end"):
            chat.say("x")
    assert [message["content"] for message in chat.messages] == (["x", "He was"] if is_whole else [])


@pytest.mark.parametrize(
    "response, says",
    [
        (JSON_HEAD + b"{}", NOT_OPENAI),
        (JSON_HEAD + b"[]", NOT_OPENAI),
        (JSON_HEAD + b'{"data": null}', NOT_OPENAI),
        (JSON_HEAD + b'{"data": ' + b"[" * 100_000, NOT_OPENAI),
        (JSON_HEAD + b"<html>", NOT_OPENAI),
        (JSON_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n{"), "gives no whole answer"),
        (CUT, "gives no whole answer"),
        (b"nonsense\r\n\r\n", "gives no whole answer"),
    ],
    ids=["object", "list", "null", "deep", "HTML", "cut short", "error cut short", "no HTTP"],
)
def test_what_is_no_list_of_models_is_said(response: bytes, says: str) -> None:
    with answering(response) as url, pytest.raises((ValueError, OSError), match=says):
        RemoteModel(url, "", "")


def test_a_server_that_goes_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.commands.chat_models.SECONDS_TO_ANSWER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(OSError, match=f"^{url} gives no whole answer"):
            RemoteModel(url, "", "")


def test_a_url_without_v1_gets_a_hint() -> None:
    not_found = b'HTTP/1.1 404 No\r\n\r\n{"error": {"message": "there is no GET /models"}}'
    for response in (not_found, JSON_HEAD + b"<html>"):
        with answering(response) as url, pytest.raises(ValueError, match=r"is /v1 missing at its end\?"):
            RemoteModel(url.removesuffix("/v1"), "", "")
    with answering(not_found) as url, pytest.raises(ValueError, match=r"there is no GET /models$"):
        RemoteModel(url, "", "")


def test_the_context_may_be_unknown() -> None:
    for told, context in ((b"null", 0), (b"512", 512)):
        with answering(JSON_HEAD + b'{"data": [{"id": "m", "max_model_len": %s}]}' % told) as url:
            assert RemoteModel(url, "", "").context == context


@pytest.mark.parametrize(
    "response, says",
    [
        (EVENTS_HEAD + b"data: null\n\n" + DONE, NOT_OPENAI),
        (EVENTS_HEAD + b'data: {"choices": [null]}\n\n' + DONE, NOT_OPENAI),
        (EVENTS_HEAD + b"data: {\n\n" + DONE, NOT_OPENAI),
        (EVENTS_HEAD + b'data: {"text": "x"}\n\n' + DONE, '{"text": "x"}'),
        (EVENTS_HEAD + b'data: {"error": {"message": "it failed"}}\n\n' + DONE, "^it failed"),
        (JSON_HEAD + b'{"choices": []}', "answers with application/json instead of a stream"),
        (CUT, "gives no whole answer"),
        (b"nonsense\r\n\r\n", "gives no whole answer"),
    ],
    ids=["null", "null choice", "half", "no choices", "error", "no stream", "error cut short", "no HTTP"],
)
def test_what_is_no_answer_is_said(response: bytes, says: str) -> None:
    with answering(MODELS, response) as url:
        chat = Chat(RemoteModel(url, "", ""), {}, Console(stderr=True))
        with pytest.raises((ValueError, OSError), match=says):
            chat.say("x")
    assert chat.messages == []


def test_an_event_may_say_nothing() -> None:
    nothing = b'data: {"choices": [{"delta": null}, {"delta": {"content": null}}], "usage": null}\n\n'
    with answering(MODELS, EVENTS_HEAD + nothing + PIECE + DONE) as url:
        assert list(RemoteModel(url, "", "").answer([], {})) == ["He was"]


def test_in_a_terminal_a_broken_server_ends_no_chat(tmp_path: Path) -> None:
    no_usage = JSON_HEAD + b"{}"
    responses = (MODELS, CUT, EVENTS_HEAD + b"data: null\n\n", EVENTS_HEAD + PIECE + DONE, no_usage)
    with answering(*responses) as url, Terminal(tmp_path, "chat", "--url", url) as terminal:
        terminal.until("> ")
        assert "error: " in terminal.ask("one")
        assert "error: " in terminal.ask("two")
        assert "He was" in terminal.ask("three")
        assert "error: " in terminal.ask("/tokens")
        terminal.type("\x04")
        assert terminal.end() == 0
