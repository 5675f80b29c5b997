"""`surefoot chat`: a conversation in the terminal. From a pipe: lines in, answers out, and nothing is a command."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from surefoot.commands import flags
from surefoot.commands.chat_models import Answer, ChatModel, LocalModel, Message, RemoteModel
from surefoot.commands.flags import SAMPLING_FLAGS, Arguments, counted
from surefoot.config.settings import Settings, state_dir

HISTORY_LINES = 1000
QUOTES = '"""'
NOT_OF_URL = {"model", "api_key"}  # settings that mean something with --url


class SavedMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    fields = flags.CHAT_DEFAULTS | flags.given_sampling(arguments)
    flags.sampling_params(fields)  # what is wrong with them is said before anything is loaded
    with contextlib.closing(_open_model(settings, arguments, console)) as model:
        chat = Chat(model, fields, console)
        if arguments["system"]:
            chat.messages = [{"role": "system", "content": arguments["system"]}]
        if not sys.stdin.isatty():
            for line in sys.stdin:
                if line.strip():
                    chat.say(line.strip())
            return 0
        with _history():
            console.print(f"{model.name}: /help lists commands, Ctrl-D ends", highlight=False, soft_wrap=True)
            _converse(chat, console)
    return 0


def _open_model(settings: Settings, arguments: Arguments, console: Console) -> ChatModel:
    if arguments["url"]:
        useless = sorted(flags.given_settings(arguments).keys() - NOT_OF_URL)
        if useless:
            raise ValueError(f"{', '.join(useless)}: means nothing with --url, the server decides")
        name = "" if settings.model == "default" else settings.model
        return RemoteModel(arguments["url"], settings.api_key, name)
    if arguments["api_key"]:
        raise ValueError("--api-key is for --url: a model in this process asks for none")
    from surefoot.llm import LLM

    with console.status("loading the model"):
        return LocalModel(LLM(settings))


def _converse(chat: Chat, console: Console) -> None:
    while True:
        try:
            text, is_quoted = _read_message()
            if text.startswith("/") and not is_quoted:
                chat.command(text)
            elif text:
                chat.say(text)
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D ends", highlight=False)
        except (ValueError, OSError, RuntimeError) as error:  # the conversation goes on without this message
            console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)


def _read_message() -> tuple[str, bool]:
    """One line, or several after a backslash at a line's end or between triple quotes; and whether quotes were there.

    Raises EOFError at the end.
    """
    line = input("> ").strip()
    if line.startswith(QUOTES):
        text = line.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + input(". ")
        return text.removesuffix(QUOTES).strip(), True
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". ")
    return line, False


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing, and the lines of earlier runs. Answers are not among them."""
    try:
        import readline
    except ImportError:  # not in every build of Python
        yield
        return
    path = state_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):  # a home that cannot be written: the lines are forgotten
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT, 0o600))
            readline.write_history_file(path)


class Chat:
    def __init__(self, model: ChatModel, fields: Mapping[str, Any], console: Console) -> None:
        self.model = model
        self.fields = dict(fields)  # of SamplingParams
        self.messages: list[Message] = []
        self._console = console
        self._is_terminal = sys.stdin.isatty()

    def say(self, text: str) -> None:
        """Raises what the model raises; then the message is not part of the conversation."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        self._answer(before)

    def command(self, line: str) -> None:
        """Raises ValueError for one that is wrong, EOFError for /exit."""
        name, _, argument = line.partition(" ")
        if name not in COMMANDS:
            raise ValueError(
                f"there is no {name}: /help lists commands; for a message, write {QUOTES}{name} ...{QUOTES}"
            )
        COMMANDS[name].run(self, argument.strip())

    def help(self, argument: str) -> None:
        for name, command in COMMANDS.items():
            self._note(f"  {f'{name} {command.arguments}':<18}{command.help}")
        self._note(f"  a \\ at the end of a line, or {QUOTES} around several, makes one message of them")

    def reset(self, argument: str) -> None:
        del self.messages[self._num_system() :]
        self._note("the conversation is forgotten")

    def set_system(self, text: str) -> None:
        self.messages[: self._num_system()] = [{"role": "system", "content": text}] if text else []
        self._note("the system message is set" if text else "there is no system message now")

    def set_sampling(self, argument: str) -> None:
        if not argument:
            for name in SAMPLING_FLAGS:
                self._note(f"  {name} {self.fields.get(name, 'none')}")
            return
        word, _, value = argument.partition(" ")
        name = word.lstrip("-").replace("-", "_").removeprefix("sampling_")
        if name not in SAMPLING_FLAGS:
            raise ValueError(f"there is no sampling flag {word}: names are {', '.join(SAMPLING_FLAGS)}")
        if not value:
            raise ValueError(f"give {name} a value, or none to take it back")
        fields = {other: kept for other, kept in self.fields.items() if other != name}
        if value != "none":
            fields[name] = [value] if name == "stop" else _number(name, value)
        flags.sampling_params(fields)
        self.fields = fields
        self._note(f"{name} is {value}")

    def retry(self, argument: str) -> None:
        before = list(self.messages)
        if before and before[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages = before
            raise ValueError("there is no message to answer again")
        self._answer(before)

    def undo(self, argument: str) -> None:
        if len(self.messages) == self._num_system():
            raise ValueError("there is nothing to undo")
        while self.messages.pop()["role"] != "user" and len(self.messages) > self._num_system():
            pass
        self._note(f"the last message and its answer are forgotten; {counted(len(self.messages), 'message')} left")

    def tokens(self, argument: str) -> None:
        used = self.model.count_tokens(self.messages) if self.messages else 0
        context = self.model.context or "unknown length"
        self._note(f"{counted(used, 'token')} of a context of {context}, with the marks of the chat template")

    def save(self, argument: str) -> None:
        path = flags.path_of(argument)
        with flags.file_errors(path):
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.messages)) + b"\n")
        self._note(f"{path} has {counted(len(self.messages), 'message')} now")

    def load(self, argument: str) -> None:
        path = flags.path_of(argument)
        with flags.file_errors(path):
            data = path.read_bytes()
        try:
            messages = msgspec.json.decode(data, type=list[SavedMessage])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a list of messages with role and content: {error}") from error
        self.messages = [{"role": message.role, "content": message.content} for message in messages]
        self._note(f"{counted(len(self.messages), 'message')}; /retry answers the last one again")

    def exit(self, argument: str) -> None:
        raise EOFError

    def _answer(self, before: list[Message]) -> None:
        """To the last message. If no answer comes, the conversation is what it was `before`."""
        began = time.monotonic()
        try:
            with contextlib.closing(self.model.answer(self.messages, self.fields)) as answer:
                text = self._print(answer)
        except BaseException:
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": text})
        if self._is_terminal and answer.output_tokens:
            seconds = time.monotonic() - began
            speed = f"in {seconds:.1f} s ({answer.output_tokens / seconds:.0f} tok/s)"
            total = f"{answer.prompt_tokens + answer.output_tokens} of {self.model.context or 'unknown'}"
            self._note(f"{counted(answer.output_tokens, 'token')} {speed}, with the prompt {total}")

    def _print(self, answer: Answer) -> str:
        """Its text. Ctrl-C stops it; what has come is kept."""
        pieces: list[str] = []
        try:
            for piece in answer:
                print(piece, end="", flush=True)
                pieces.append(piece)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
        finally:  # an error has a line of its own
            print()
        return "".join(pieces)

    def _num_system(self) -> int:
        """Messages before the conversation: one, or none."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _note(self, text: str) -> None:
        self._console.print(escape(text), style="dim", highlight=False, soft_wrap=True)


class Command(Struct, frozen=True):
    run: Callable[[Chat, str], None]
    arguments: str
    help: str


COMMANDS = {
    "/help": Command(Chat.help, "", "show this list"),
    "/reset": Command(Chat.reset, "", "forget the conversation, but not the system message"),
    "/system": Command(Chat.set_system, "[TEXT]", "set the system message; without TEXT remove it"),
    "/set": Command(Chat.set_sampling, "[NAME VALUE]", "change a sampling flag: /set temperature 0.2; alone show all"),
    "/retry": Command(Chat.retry, "", "answer the last message again"),
    "/undo": Command(Chat.undo, "", "forget the last message and its answer"),
    "/tokens": Command(Chat.tokens, "", "how much of the context the conversation takes"),
    "/save": Command(Chat.save, "FILE", "write the conversation as JSON"),
    "/load": Command(Chat.load, "FILE", "read it back"),
    "/exit": Command(Chat.exit, "", "end; so does Ctrl-D"),
}


def _number(name: str, value: str) -> int | float:
    kind = SAMPLING_FLAGS[name].kind
    try:
        return kind(value)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(f"{name} {value!r} is not {'a whole number' if kind is int else 'a number'}") from error
