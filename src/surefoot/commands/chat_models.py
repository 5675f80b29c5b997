"""Who answers in `surefoot chat`: a model in this process, or a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


class RemoteModel:
    """A server with the OpenAI API."""

    def __init__(self, url: str, api_key: str, name: str) -> None:
        """`name`: the model to ask for; empty is the first one of the server."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url} is not of the form http://host:port/v1")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/models") as response:
            models = {model["id"]: model for model in json.load(response)["data"]}
        self.name = name or next(iter(models), "")
        if self.name not in models:
            raise ValueError(f"{url} does not serve {self.name!r}; it has {', '.join(models) or 'no model'}")
        self.context = int(models[self.name].get("max_model_len", 0))

    def answer(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        body = {"model": self.name, "messages": list(messages), **fields}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return _RemoteAnswer(self._open("/chat/completions", body))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """The API tells it with an answer, so one token is asked for."""
        body = {"model": self.name, "messages": list(messages), "max_tokens": 1}
        with self._open("/chat/completions", body) as response:
            return int(json.load(response)["usage"]["prompt_tokens"])

    def close(self) -> None:
        pass

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._url} answered {error.code}: {_message(error.read())}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{self._url} cannot be reached: {error.reason}") from error
        return response


class _RemoteAnswer:
    """Server-sent events of a chat completion."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.prompt_tokens = 0
        self.output_tokens = 0

    def __iter__(self) -> Iterator[str]:
        for data in self._data():
            event = json.loads(data)
            if "error" in event:
                raise ValueError(_message(data))
            if usage := event.get("usage"):
                self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""

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


def _message(body: bytes) -> str:
    """Of an error in OpenAI's shape; else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
