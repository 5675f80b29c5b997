"""A JSONL file of requests in, a JSONL file of answers out: one line for one line, in the same order.

Each line becomes a request to the server's own application (see in_process_server), so fields, checks and errors are
those of the HTTP API. Two forms of lines, which may be mixed:

ShortLine    {"prompt": ...} or {"messages": ...}, with any field of the API, and perhaps an "id"
             -> {"index", "id", "text", "finish_reason", "usage"}, or {"index", "id", "status_code", "error"}
OpenAILine   {"custom_id", "method": "POST", "url", "body"}: the format of OpenAI's batches
             -> {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}

A line that is wrong gets an error as its answer, and the others go on.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from surefoot.commands.in_process_server import Answer, InProcessServer
from surefoot.http import json_body
from surefoot.http.errors import ApiError

Json = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FULL_QUEUE_SECONDS = 0.05  # before a line that needs several places asks again


class ShortLine(Struct, frozen=True):
    index: int  # of the line, from 0; blank lines are not counted
    own: Json  # its "id", if it has one
    body: Json
    refusal: str = ""  # why it is not sent at all

    @property
    def url(self) -> str:
        return CHAT if "messages" in self.body else COMPLETIONS

    def result(self, answer: Answer) -> Json:
        head = {"index": self.index, **self.own}
        body = msgspec.json.decode(answer.body)
        if answer.status != 200:
            return {**head, "status_code": answer.status, "error": body["error"]}
        choices = [_short_choice(choice) for choice in body["choices"]]
        return {**head, **(choices[0] if len(choices) == 1 else {"choices": choices}), "usage": body["usage"]}

    def matches(self, result: Json) -> bool:
        """Whether `result` may be the answer to this line."""
        return result.get("index") == self.index and all(result.get(name) == value for name, value in self.own.items())

    def may_begin(self, text: bytes) -> bool:
        """Whether the answer to this line may begin with `text`."""
        return _may_begin({"index": self.index, **self.own}, text)


class OpenAILine(Struct, frozen=True):
    custom_id: Any  # text, if the line is not refused
    url: str
    body: Json
    refusal: str = ""

    def result(self, answer: Answer) -> Json:
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": msgspec.json.decode(answer.body),
        }
        made = f"batch_req_{answer.request_id}"
        return {"id": made, "custom_id": self.custom_id, "response": response, "error": None}

    def matches(self, result: Json) -> bool:
        return "response" in result and result.get("custom_id") == self.custom_id

    def may_begin(self, text: bytes) -> bool:
        made = re.match(rb'{"id":"(batch_req_\w*)', text)
        return _may_begin({"id": made[1].decode() if made else "batch_req_", "custom_id": self.custom_id}, text)


Line = ShortLine | OpenAILine


def json_line(fields: Json) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def parse(text: bytes, index: int, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Line:
    """A line of the input. Fields that it does not have are taken from `given`, and in a short line from `defaults`."""
    try:
        json_body.parse(text)
        fields = msgspec.json.decode(text)  # refuses too what could not be sent on: half a character, 1e999
    except json_body.InvalidJson as error:
        return ShortLine(index, {}, {}, error.detail.replace("the body", "this line", 1))
    except msgspec.DecodeError as error:
        return ShortLine(index, {}, {}, f"this line is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return ShortLine(index, {}, {}, "this line is not a JSON object")
    if "body" in fields or "custom_id" in fields:
        return _parse_openai_line(fields, given)
    own = {"id": fields.pop("id")} if "id" in fields else {}
    body = _filled(fields, {**defaults, **given})
    refusal = "" if ("prompt" in fields) != ("messages" in fields) else 'give either "prompt" or "messages"'
    return ShortLine(index, own, body, refusal or _why_unfit(body))


def _parse_openai_line(fields: Json, given: Mapping[str, Any]) -> OpenAILine:
    custom_id: Any = fields.get("custom_id")
    url: Any = fields.get("url")
    body: Any = fields.get("body")
    refusal = ""
    if not isinstance(custom_id, str):
        refusal = f"custom_id is {custom_id!r}; it must be a text"
    elif fields.get("method") != "POST":
        refusal = f'method is {fields.get("method")!r}; it must be "POST"'
    elif url not in (CHAT, COMPLETIONS):
        refusal = f"url is {url!r}; it must be {CHAT} or {COMPLETIONS}"
    elif not isinstance(body, dict):
        refusal = "body must be a JSON object"
    elif unknown := fields.keys() - {"custom_id", "method", "url", "body"}:
        refusal = f"unknown field: {min(unknown)}"
    if refusal:
        return OpenAILine(custom_id, "", {}, refusal)
    return OpenAILine(custom_id, url, _filled(body, given), _why_unfit(body))


def _filled(body: Json, others: Mapping[str, Any]) -> Json:
    """With those of the `others` that it leaves out."""
    if "max_completion_tokens" in body:  # the newer name of max_tokens
        others = {name: value for name, value in others.items() if name != "max_tokens"}
    return {**others, **body}


def _why_unfit(body: Json) -> str:
    return "stream: a batch gives whole answers; leave it out" if body.get("stream") else ""


async def answer(server: InProcessServer, line: Line) -> Json:
    """The line of the output."""
    if line.refusal:
        refused = ApiError(400, line.refusal, code="invalid_value")
        return line.result(Answer(400, uuid.uuid4().hex, msgspec.json.encode(refused.body)))
    model = {"model": server.model_name} if isinstance(line, ShortLine) else {}
    body = msgspec.json.encode(model | line.body)
    while _is_queue_full(found := await server.post(line.url, body)):
        await asyncio.sleep(FULL_QUEUE_SECONDS)
    return line.result(found)


async def answer_all(
    server: InProcessServer, lines: Sequence[Line], places: int, write: Callable[[Json], None]
) -> None:
    """Answers `places` lines at once. Calls `write` with the answers, in the order of the lines."""
    waiting: deque[asyncio.Task[Json]] = deque()
    try:
        for line in lines:
            waiting.append(asyncio.create_task(answer(server, line)))
            if len(waiting) == places:
                write(await waiting[0])
                waiting.popleft()
        while waiting:
            write(await waiting[0])
            waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _short_choice(choice: Json) -> Json:
    """Of a chat or a text completion: its text, and whatever else it has."""
    message = choice.get("message", {})
    text = message.get("content", "") if message else choice["text"]
    rest = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
    if message.get("tool_calls"):
        rest["tool_calls"] = message["tool_calls"]
    return {"text": text, "finish_reason": choice["finish_reason"], **rest}


def _may_begin(fields: Json, text: bytes) -> bool:
    """Whether a line may begin with `text` whose first fields are these."""
    head = json_line(fields).removesuffix(b"}\n") + b","
    return head.startswith(text) or text.startswith(head)


def _is_queue_full(answer: Answer) -> bool:
    return answer.status == 503 and msgspec.json.decode(answer.body)["error"]["code"] == "queue_full"
