"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from surefoot.frontend.output import Output, Score, ScoredToken
from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.answer_schema import ChatChunk, ChatCompletion
from surefoot.http.generation import Choice, GenerationResponse
from surefoot.http.json_body import JsonRoute
from surefoot.http.logprobs import TokenSpelling
from surefoot.http.openai_schema import ChatBody
from surefoot.http.openapi import generation_responses
from surefoot.http.service import Service

Json = dict[str, Any]


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, outputs: Sequence[Output], spelling: TokenSpelling) -> None:
        self._body = body
        self._outputs = outputs
        self._spelling = spelling

    def whole(self, choices: Sequence[Choice]) -> Json:
        body = self._body
        answer: Json = {"choices": [self._whole_choice(choice) for choice in choices]}
        if body.prompt_logprobs is not None:
            prompt_ids, scores = self._outputs[0].request.prompt_ids, choices[0].prompt_scores
            answer["prompt_logprobs"] = self._spelling.of_prompt(prompt_ids, scores, body.prompt_logprobs)
        return answer

    def opening(self) -> list[Json]:
        return [
            self._chunk_choice(index, {"role": "assistant", "content": ""}, ()) for index in range(len(self._outputs))
        ]

    def begun(self, index: int, prompt_scores: Sequence[Score]) -> list[Json]:
        return []

    def piece(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> Json:
        return self._chunk_choice(index, {"content": text}, tokens)

    def ending(self, index: int, reason: str, tokens: Sequence[ScoredToken]) -> Json:
        return self._chunk_choice(index, {}, tokens) | {"finish_reason": reason}

    def _whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._spelling.of_chat(choice.tokens) if self._body.logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _chunk_choice(self, index: int, delta: dict[str, str], tokens: Sequence[ScoredToken]) -> Json:
        logprobs = self._spelling.of_chat(tokens) if tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["generation"])

    @router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion, ChatChunk))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The answer to a conversation: `n` choices, whole or as server-sent events."""
        service.check_model(body.model)
        service.check_choices(body.n)
        params = body.sampling_params(_max_tokens(body))
        if body.truncate_prompt_tokens is None:
            characters = sum(len(message.text) for message in body.messages)
            service.check_fits(characters, len(body.messages), "messages")
        ids = await service.chat_ids(body.messages, body, body.add_special_tokens)
        outputs = service.outputs(body.truncated(ids), params, body)
        spelling = TokenSpelling(service.tokenizer, body.return_tokens_as_token_ids)
        return GenerationResponse(service, request, body, outputs, ChatShape(body, outputs, spelling))

    return router


def _max_tokens(body: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer word for `max_tokens`."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ParameterError("max_tokens", f"max_tokens is {old} and max_completion_tokens is {new}: send one of them")
    return old if new is None else new
