"""POST /tokenize and /detokenize, also under /v1: text to token ids and back, as the model would see them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec.json import encode
from starlette.responses import Response

from surefoot.frontend.sampling_params import ParameterError, check_ids
from surefoot.http.answer_schema import Detokenized, Tokenized
from surefoot.http.json_body import JsonRoute
from surefoot.http.openai_schema import DetokenizeBody, TemplateOptions, TokenizeBody
from surefoot.http.openapi import json_responses
from surefoot.http.service import Service
from surefoot.http.turns import in_turn


def tokenization_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["tokens"])

    @router.post("/v1/tokenize", responses=json_responses(Tokenized))
    @router.post("/tokenize", responses=json_responses(Tokenized))
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a prompt, or of a conversation after the model's chat template."""
        service.check_model(body.model or service.plan.engine.served_model_name)
        ids = await _ids(service, body)
        content = await in_turn(len(ids), lambda: encode(_told(service, body, ids)))
        return Response(content, media_type="application/json")

    @router.post("/v1/detokenize", responses=json_responses(Detokenized))
    @router.post("/detokenize", responses=json_responses(Detokenized))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model or service.plan.engine.served_model_name)
        service.check_length("tokens", "ids", len(body.tokens))
        check_ids("tokens", body.tokens, service.plan.engine.model.vocab_size)
        prompt = await in_turn(
            len(body.tokens), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return Response(encode({"prompt": prompt}), media_type="application/json")

    return router


async def _ids(service: Service, body: TokenizeBody) -> list[int]:
    """Unlike a prompt to generate from, it may be longer than the context."""
    match body.prompt, body.messages, body.add_special_tokens:
        case str(prompt), None, add_special_tokens:
            if unread := sorted(body.model_fields_set & TemplateOptions.model_fields.keys()):
                raise ParameterError(unread[0], f"{unread[0]} means something with messages, not with a prompt")
            return await service.text_ids(prompt, add_special_tokens is not False)
        case None, list(messages), add_special_tokens:
            return await service.chat_ids(messages, body, add_special_tokens is True)
        case _:
            raise ParameterError("prompt", "send either prompt or messages")


def _told(service: Service, body: TokenizeBody, ids: list[int]) -> dict[str, Any]:
    return {
        "count": len(ids),
        "max_model_len": service.plan.engine.bounds.max_model_len,
        "tokens": ids,
        "token_strs": [service.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None,
    }
