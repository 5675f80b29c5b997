"""POST /v1/completions: each prompt, text or token ids, gives one choice."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.generation import GenerationResponse
from surefoot.http.openai_schema import COMPLETION_MAX_TOKENS, CompletionBody
from surefoot.http.service import Service


class CompletionShape:
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self, count: int) -> list[dict[str, Any]]:
        return []

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self.whole(index, text, None)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self.whole(index, "", reason)


def completion_router(service: Service) -> APIRouter:
    router = APIRouter()
    bounds = service.plan.engine.bounds
    places = bounds.max_running_requests + bounds.max_queued_requests

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        params = body.sampling_params(COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
        prompts = _as_list(body.prompt)
        if not 1 <= len(prompts) <= places:
            raise ParameterError("prompt", f"{len(prompts)} prompts in one request; allowed are 1 to {places}")
        sequences = [service.sequence(await _prompt_ids(service, prompt), params) for prompt in prompts]
        return GenerationResponse(service, request, body, sequences, CompletionShape())

    return router


async def _prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return await service.tokenize(
        len(prompt), "prompt", lambda: service.tokenizer.encode(prompt, add_special_tokens=True)
    )


def _as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt is a list of one. An empty list holds no prompt."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [prompt]  # type: ignore[list-item]
        case _:
            return list(prompt)  # type: ignore[arg-type]
