"""Who answers in `surefoot chat`: a model in this process, or a server."""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from surefoot.commands import flags

if TYPE_CHECKING:
    from surefoot.llm import LLM

Message = dict[str, str]  # role and content
SECONDS_TO_ANSWER = 600.0


class Answer(Protocol):
    """Its text, as it comes. Closing it stops it."""

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int:
        """So far, or 0 where it is not known before the end."""


class ChatModel(Protocol):
    """Raises ValueError, OSError or RuntimeError, whose message is for the user."""

    name: str
    context: int  # tokens; 0: not known

    def answer(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        """`fields`: of SamplingParams."""

    def count_tokens(self, messages: Sequence[Message]) -> int: ...

    def close(self) -> None: ...


class LocalModel:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.plan.served_model_name
        self.context = llm.plan.bounds.max_model_len
        self.count_tokens = llm.count_tokens
        self.close = llm.close

    def answer(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        return self._llm.stream_chat(messages, flags.sampling_params(fields))


# ---- Another server --------------------------------------------------------------------------------------------------


class _ServedModel(Struct):
    id: str
    max_model_len: int | None = None  # not every server tells it


class _Models(Struct):
    data: list[_ServedModel]


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int


class _WholeAnswer(Struct):
    usage: _Usage


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None


class _Event(Struct):
    """Of a stream. One without choices is an error too."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Error(Struct):
    message: str


class _Failure(Struct):
    error: _Error


Body = TypeVar("Body")


class RemoteModel:
    """A server with the OpenAI API."""

    def __init__(self, url: str, api_key: str, name: str) -> None:
        """`name`: the model to ask for; empty is the first one of the server."""
        if not _is_url(url):
            raise ValueError(f"--url {url} is not of the form http://host:port/v1")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        models = {model.id: model for model in self._ask("/models", _Models).data}
        self.name = name or next(iter(models), "")
        if self.name not in models:
            raise ValueError(f"{url} does not serve {self.name!r}; it has {', '.join(models) or 'no model'}")
        self.context = models[self.name].max_model_len or 0

    def answer(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        body = {"model": self.name, "messages": list(messages), **fields}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return _RemoteAnswer(self._url, self._open("/chat/completions", body))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """The API tells it with an answer, so one token is asked for."""
        body = {"model": self.name, "messages": list(messages), "max_tokens": 1}
        return self._ask("/chat/completions", _WholeAnswer, body).usage.prompt_tokens

    def close(self) -> None:
        pass

    def _ask(self, path: str, kind: type[Body], body: dict[str, Any] | None = None) -> Body:
        with self._open(path, body) as response, _network_errors(self._url):
            data = response.read()
        return _decode(self._url, data, kind)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self._url + path, data, self._headers)
        with _network_errors(self._url):
            try:
                response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER)
            except urllib.error.HTTPError as error:
                hint = "; is /v1 missing at its end?" if error.code == 404 and _lacks_v1(self._url) else ""
                raise ValueError(f"{self._url} answered {error.code}: {_message(error.read())}{hint}") from error
        return response


class _RemoteAnswer:
    """Server-sent events of a chat completion."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self._url = url
        self._response = response
        self.prompt_tokens = 0
        self.output_tokens = 0

    def __iter__(self) -> Iterator[str]:
        kind = self._response.headers.get_content_type()
        if kind != "text/event-stream":
            raise ValueError(f"{self._url} answers with {kind} instead of a stream of events: {_way_out(self._url)}")
        for data in self._data():
            event = _decode(self._url, data, _Event)
            if event.error or event.choices is None:
                raise ValueError(_message(data))
            if event.usage:
                self.prompt_tokens, self.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            for choice in event.choices:
                if choice.delta and choice.delta.content:
                    yield choice.delta.content

    def _data(self) -> Iterator[bytes]:
        """Of each event, until the server says that there are no more. Raises OSError if it never does."""
        with contextlib.suppress(http.client.HTTPException, OSError):
            for line in self._response:
                if line.startswith(b"data:") and line.endswith(b"\n"):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield data
        raise OSError("the connection broke before the answer's end: say it again when the server is back")

    def close(self) -> None:
        self._response.close()


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        return False
    return is_server and "@" not in parts.netloc and bool(re.fullmatch("[!-~]+", text))


@contextlib.contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """What goes wrong on the way becomes an OSError with a sentence."""
    try:
        yield
    except urllib.error.URLError as error:
        raise OSError(f"{url} cannot be reached: {error.reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise OSError(f"{url} gives no whole answer ({error}): {_way_out(url)}") from error


def _decode(url: str, data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{url} does not answer as the OpenAI API does ({error}): {_way_out(url)}") from error


def _way_out(url: str) -> str:
    return "is /v1 missing at its end?" if _lacks_v1(url) else "does something else listen there?"


def _lacks_v1(url: str) -> bool:
    return not url.endswith("/v1")


def _message(body: bytes) -> str:
    """Of an error in OpenAI's shape; else the body itself."""
    try:
        return msgspec.json.decode(body, type=_Failure).error.message
    except (msgspec.DecodeError, RecursionError):
        return body.decode(errors="replace")[:200]
