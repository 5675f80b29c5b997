"""`surefoot chat`: its commands over a model that says what it is told, and all of it in a terminal."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.commands.chat import Chat
from surefoot.commands.chat_models import RemoteModel
from tests.cli.terminal import Terminal, surefoot
from tests.e2e.server import Server
from tests.tiny import TinyLlama

FLAGS = ("--weight-dtype=float32", "--max-running-requests=2", "--kv-cache-tokens=1024", "--threads=1")


class Echo:
    """Answers with the last message in capitals; an answer with the word "fail" fails there."""

    name = "echo"
    context = 100

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], dict[str, Any]]] = []

    def answer(self, messages: Sequence[dict[str, str]], fields: Mapping[str, Any]) -> EchoAnswer:
        self.asked.append((list(messages), dict(fields)))
        return EchoAnswer(messages[-1]["content"])

    def count_tokens(self, messages: Sequence[dict[str, str]]) -> int:
        return sum(len(message["content"]) for message in messages)

    def close(self) -> None:
        pass


class EchoAnswer:
    def __init__(self, text: str) -> None:
        self._text = text
        self.prompt_tokens = self.output_tokens = len(text)

    def __iter__(self) -> Iterator[str]:
        for word in self._text.split():
            if word == "fail":
                raise RuntimeError("it failed")
            yield word.upper()

    def close(self) -> None:
        pass


@pytest.fixture
def chat() -> Chat:
    return Chat(Echo(), {"temperature": 0.6}, Console(stderr=True))


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages]


def test_a_conversation_is_what_was_said_and_answered(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.say("a")
    chat.say("b")
    assert contents(chat) == ["a", "A", "b", "B"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert capsys.readouterr().out == "A\nB\n"


def test_a_message_without_a_whole_answer_is_forgotten(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.say("a")
    with pytest.raises(RuntimeError):
        chat.say("b fail")
    assert contents(chat) == ["a", "A"]
    assert capsys.readouterr().out == "A\nB\n"  # the error that comes has a line of its own


def test_ctrl_c_after_an_answer_costs_none(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_is_terminal", True)
    monkeypatch.setattr(chat, "_note", interrupted)
    for act in (lambda: chat.say("a"), lambda: chat.retry("")):
        with pytest.raises(KeyboardInterrupt):
            act()
        assert contents(chat) == ["a", "A"]


def test_system_reset_undo(chat: Chat) -> None:
    chat.say("a")
    chat.command("/system be brief")
    chat.command("/system be very brief")
    assert contents(chat) == ["be very brief", "a", "A"]
    chat.say("b")
    chat.command("/undo")
    assert contents(chat) == ["be very brief", "a", "A"]
    chat.command("/undo")
    assert contents(chat) == ["be very brief"]
    with pytest.raises(ValueError, match="nothing to undo"):
        chat.command("/undo")
    chat.say("c")
    chat.command("/reset")
    assert contents(chat) == ["be very brief"]
    chat.command("/system")
    assert contents(chat) == []


def test_retry_asks_the_same_again(chat: Chat) -> None:
    with pytest.raises(ValueError, match="no message to answer again"):
        chat.command("/retry")
    chat.say("a")
    chat.command("/set top-p 0.5")
    chat.command("/retry")
    assert contents(chat) == ["a", "A"]
    (first, _), (second, fields) = chat.model.asked  # type: ignore[attr-defined]
    assert first == second
    assert fields == {"temperature": 0.6, "top_p": 0.5}


def test_set_takes_every_sampling_flag_and_refuses_what_it_cannot_be(chat: Chat) -> None:
    chat.command("/set max-tokens 5")
    chat.command("/set stop two words")
    chat.command("/set --sampling-seed 3")
    assert chat.fields == {"temperature": 0.6, "max_tokens": 5, "stop": ["two words"], "seed": 3}
    chat.command("/set temperature none")
    assert "temperature" not in chat.fields
    kept = dict(chat.fields)
    for line, says in (
        ("/set temperature 9", "temperature is 9.0; allowed is: from 0 to 2"),
        ("/set top_k many", "top_k 'many' is not a whole number"),
        ("/set tempo 1", "there is no sampling flag tempo: names are max_tokens, temperature"),
        ("/set top_k", "give top_k a value"),
    ):
        with pytest.raises(ValueError, match=says):
            chat.command(line)
    assert chat.fields == kept


def test_save_and_load(chat: Chat, tmp_path: Path) -> None:
    chat.command("/system s")
    chat.say("a")
    saved = list(chat.messages)
    chat.command(f"/save {tmp_path}/chat.json")
    assert json.loads((tmp_path / "chat.json").read_text()) == saved
    chat.command("/reset")
    chat.command(f"/load {tmp_path}/chat.json")
    assert chat.messages == saved
    (tmp_path / "wrong.json").write_text('[{"role": "robot", "content": "x"}]')
    for name, says in (("wrong.json", "is not a list of messages"), ("none.json", "there is no file")):
        with pytest.raises((ValueError, OSError), match=says):
            chat.command(f"/load {tmp_path}/{name}")
    for name, says in (
        ("", "name of a file"),
        (str(tmp_path), "is a directory: give a file"),
        ("/nowhere/x", "there is no directory /nowhere for x: make it"),
        ("~nobody-here/x", "begins with a user who is not known here"),
    ):
        with pytest.raises((ValueError, OSError), match=says):
            chat.command(f"/save {name}")
    assert chat.messages == saved


def test_help_tokens_exit_and_what_is_none_of_them(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.command("/help")
    assert "/retry" in capsys.readouterr().err
    chat.say("abc")
    chat.command("/tokens")
    assert "6 tokens of a context of 100, with the marks of the chat template" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no /nonsense"):
        chat.command("/nonsense x")
    with pytest.raises(EOFError):
        chat.command("/exit")


def test_from_a_pipe_lines_are_messages_and_only_answers_come_out(tiny_llama: TinyLlama) -> None:
    flags = (*FLAGS, "--temperature=0", "--max-tokens=6")
    ended = surefoot("chat", str(tiny_llama.path), *flags, stdin="the lazy dog\n\n/help\n")
    assert (ended.returncode, ended.stderr) == (0, "")
    alone = surefoot("chat", str(tiny_llama.path), *flags, stdin="the lazy dog\n")
    assert ended.stdout.startswith(alone.stdout)
    assert len(ended.stdout) > len(alone.stdout)


def test_in_a_terminal(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    flags = ("chat", str(tiny_llama.path), *FLAGS, "--temperature=0", "--max-tokens=5")
    with Terminal(tmp_path, *flags) as terminal:
        assert "/help lists commands" in terminal.until("> ")
        shown = terminal.ask("the quick")
        assert "5 tokens in" in shown
        assert "tok/s), with the prompt " in shown
        assert "there is no /nonsense" in terminal.ask("/nonsense")
        terminal.type("one \\\n")
        terminal.until(". ")
        terminal.ask("two")
        terminal.type('"""\n')
        terminal.until(". ")
        terminal.type("three\n")
        terminal.until(". ")
        terminal.ask('four"""')
        assert "5 tokens in" in terminal.ask('"""/help me"""')
        terminal.ask("/undo")
        terminal.ask(f"/save {tmp_path}/chat.json")
        terminal.ask("/set max_tokens none")
        terminal.type("go on\n")
        terminal.until("go on\n")
        terminal.until("e")  # some of the answer
        terminal.type("\x03")
        assert "tok/s), with the prompt " in terminal.until("> ")
        terminal.ask(f"/save {tmp_path}/longer.json")
        terminal.type("half a line")
        terminal.interrupt("Ctrl-D ends")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["content"] for message in saved[::2]] == ["the quick", "one \ntwo", "three\nfour"]
    longer = json.loads((tmp_path / "longer.json").read_text())
    assert (len(longer), longer[-2]["content"]) == (8, "go on")
    assert longer[-1]["role"] == "assistant"
    history = tmp_path / "surefoot" / "chat_history"
    assert "the quick\n/nonsense\n" in history.read_text()
    assert saved[1]["content"] not in history.read_text()
    assert stat.S_IMODE(os.stat(history).st_mode) == 0o600


def test_with_a_server(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    settings = {"model": tiny_llama.path, "weight_dtype": "float32", "kv_cache_tokens": 1024, "threads": 1}
    with Server(tmp_path / "log", api_key="hush", **settings) as server:
        url = f"{server.url}/v1"
        flags = ("--temperature=0", "--max-tokens=6")
        ended = surefoot("chat", "--url", url, "--api-key=hush", *flags, stdin="the lazy dog\n")
        assert (ended.returncode, ended.stderr) == (0, "")
        local = surefoot("chat", str(tiny_llama.path), *FLAGS, *flags, stdin="the lazy dog\n")
        assert ended.stdout == local.stdout

        refused = surefoot("chat", "--url", url, stdin="x\n")
        assert refused.returncode == 2
        assert "answered 401: wrong or missing key" in refused.stderr
        other = surefoot("chat", "gpt", "--url", url, "--api-key=hush", stdin="x\n")
        assert "does not serve 'gpt'" in other.stderr

        model = RemoteModel(url, "hush", "")
        messages = [{"role": "user", "content": "the lazy dog"}]
        assert model.context == 512
        answer = model.answer(messages, {"temperature": 0, "max_tokens": 6, "ignore_eos": True})
        assert "".join(answer)
        assert answer.output_tokens == 6
        assert answer.prompt_tokens == model.count_tokens(messages)
        with pytest.raises(ValueError, match="answered 400: top_p"):
            model.answer(messages, {"top_p": 7})


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--url", "127.0.0.1:1"], "is not of the form http://host:port/v1"),
        (["--url", "http://a b/v1"], "is not of the form http://host:port/v1"),
        (["--url", "http://127.0.0.1:99999/v1"], "is not of the form http://host:port/v1"),
        (["--url", "http://[::1/v1"], "is not of the form http://host:port/v1"),
        (["--url", "http://user:word@127.0.0.1:1/v1"], "is not of the form http://host:port/v1"),
        (["--url", "http://127.0.0.1:1/v1"], "cannot be reached"),
        (["--url", "http://127.0.0.1:1/v1", "--page-size", "8"], "page_size: means nothing with --url"),
        (["--api-key", "x"], "--api-key is for --url"),
        (["--temperature", "9"], "temperature is 9.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_said(tiny_llama: TinyLlama, flags: list[str], says: str) -> None:
    model = [] if "--url" in flags else [f"--model={tiny_llama.path}", *FLAGS]
    ended = surefoot("chat", *model, *flags, stdin="x\n")
    assert ended.returncode == 2
    assert says in ended.stderr
