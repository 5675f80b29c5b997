"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.generation import GenerationResponse
from surefoot.http.openai_schema import ChatBody
from surefoot.http.service import Service


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self, count: int) -> list[dict[str, Any]]:
        return [self._choice(index, {"role": "assistant", "content": ""}) for index in range(count)]

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, {"content": text})

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self._choice(index, {}, reason)

    def _choice(self, index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        params = body.sampling_params(_max_tokens(body))
        messages = [message.for_template() for message in body.messages]

        def prompt_ids() -> list[int]:
            text = service.tokenizer.apply_chat_template(messages, body.add_generation_prompt)
            return service.tokenizer.encode(text, add_special_tokens=False)

        # A message is at least one token, so that many are as long as so many characters.
        longest = service.tokenizer.longest_token
        characters = sum(len(message["content"]) for message in messages) + longest * len(messages)
        ids = await service.tokenize(characters, "messages", prompt_ids)
        return GenerationResponse(service, request, body, [service.sequence(ids, params)], ChatShape())

    return router


def _max_tokens(body: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer word for `max_tokens`."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ParameterError("max_tokens", f"max_tokens is {old} and max_completion_tokens is {new}: send one of them")
    return old if new is None else new
