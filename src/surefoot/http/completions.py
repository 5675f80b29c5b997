"""POST /v1/completions: each prompt, text or token ids, gives `n` choices, those of the first prompt first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from surefoot.frontend.detokenizer import IncrementalDecoder
from surefoot.frontend.output import NO_SCORE, Output, Score, ScoredToken, Verbatim
from surefoot.frontend.sampling_params import ParameterError
from surefoot.http.answer_schema import TextCompletion
from surefoot.http.generation import Choice, GenerationResponse
from surefoot.http.json_body import JsonRoute
from surefoot.http.logprobs import TokenSpelling
from surefoot.http.openai_schema import COMPLETION_MAX_TOKENS, CompletionBody
from surefoot.http.openapi import generation_responses
from surefoot.http.service import Service, Tokenizer
from surefoot.http.turns import in_turn

Json = dict[str, Any]


@dataclass(frozen=True)
class Echo:
    """A prompt as it stands before its outputs. Nothing of it without `echo`."""

    text: str
    offsets: tuple[int, ...]  # characters before each token; empty if no logprobs are told


NO_ECHO = Echo("", ())


class CompletionShape:
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, body: CompletionBody, outputs: Sequence[Output], echoes: Sequence[Echo], spelling: TokenSpelling
    ) -> None:
        """One echo for each output."""
        self._body = body
        self._outputs = outputs
        self._echoes = echoes
        self._spelling = spelling

    def whole(self, choices: Sequence[Choice]) -> Json:
        return {"choices": [self._whole_choice(choice) for choice in choices]}

    def opening(self) -> list[Json]:
        return []

    def begun(self, index: int, prompt_scores: Sequence[Score]) -> list[Json]:
        if not self._body.echo:
            return []
        return [self._choice(index, self._echoes[index].text, self._echoed(index, prompt_scores))]

    def piece(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> Json:
        return self._choice(index, text, self._placed(index, tokens))

    def ending(self, index: int, reason: str, tokens: Sequence[ScoredToken]) -> Json:
        return self._choice(index, "", self._placed(index, tokens)) | {"finish_reason": reason}

    def _whole_choice(self, choice: Choice) -> Json:
        index, wanted = choice.index, self._body.prompt_logprobs
        tokens = self._echoed(index, choice.prompt_scores) + self._placed(index, choice.tokens)
        told = self._choice(index, self._echoes[index].text + choice.text, tokens) | {"finish_reason": choice.reason}
        if wanted is not None:
            prompt_ids = self._outputs[index].request.prompt_ids
            told["prompt_logprobs"] = self._spelling.of_prompt(prompt_ids, choice.prompt_scores, wanted)
        return told

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> Json:
        most = self._body.logprobs
        logprobs = None if most is None else self._spelling.of_text(tokens, most)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _echoed(self, index: int, scores: Sequence[Score]) -> list[ScoredToken]:
        prompt_ids, offsets = self._outputs[index].request.prompt_ids, self._echoes[index].offsets
        if not offsets:
            return []
        return [ScoredToken(*token) for token in zip(prompt_ids, (NO_SCORE, *scores), offsets, strict=True)]

    def _placed(self, index: int, tokens: Sequence[ScoredToken]) -> list[ScoredToken]:
        """Offsets of an output count from the beginning of its echo."""
        before = len(self._echoes[index].text)
        return [replace(token, offset=before + token.offset) for token in tokens]


def completion_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["generation"])

    @router.post("/v1/completions", responses=generation_responses(TextCompletion, TextCompletion))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Texts that continue prompts: `n` choices for each prompt, whole or as server-sent events."""
        service.check_model(body.model)
        params = body.sampling_params(COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
        prompts = _as_list(body.prompt)
        service.check_choices(body.n)
        if not 1 <= len(prompts) * body.n <= service.places:
            count = f"{len(prompts)} prompts" + (f" times n = {body.n}" if body.n > 1 else "")
            raise ParameterError("prompt", f"{count} in one request; allowed are 1 to {service.places} choices")
        outputs: list[Output] = []
        echoes: list[Echo] = []
        for prompt in prompts:
            ids = await _prompt_ids(service, prompt, body)
            outputs += service.outputs(ids, params, body)
            echoes += [await _echo(service, prompt, ids, body)] * body.n
        spelling = TokenSpelling(service.tokenizer, body.return_tokens_as_token_ids)
        return GenerationResponse(service, request, body, outputs, CompletionShape(body, outputs, echoes, spelling))

    return router


async def _prompt_ids(service: Service, prompt: str | list[int], body: CompletionBody) -> list[int]:
    if not isinstance(prompt, str):
        return body.truncated(prompt)
    if body.truncate_prompt_tokens is None:
        service.check_fits(len(prompt), 0, "prompt")
    return body.truncated(await service.text_ids(prompt, body.add_special_tokens))


async def _echo(service: Service, prompt: str | list[int], ids: list[int], body: CompletionBody) -> Echo:
    if not body.echo:
        return NO_ECHO
    given = prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else ""
    wants_offsets = body.logprobs is not None
    return await in_turn(len(ids), lambda: make_echo(service.tokenizer, given, ids, wants_offsets))


def make_echo(tokenizer: Tokenizer, given: str, ids: Sequence[int], wants_offsets: bool) -> Echo:
    """`given` as it is; without a text, that of the ids with their special tokens.

    Tokens that were put before `given` have offset 0. The other offsets are exact, unless the tokenizer rewrites text.
    """
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    text = given or decoded
    if not wants_offsets:
        return Echo(text, ())
    decoder, at, offsets = IncrementalDecoder(Verbatim(tokenizer)), -max(0, decoded.find(text)), []
    for token in ids:
        offsets.append(min(max(0, at), len(text)))
        at += len(decoder.push(token))
    return Echo(text, tuple(offsets))


def _as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt is a list of one. An empty list holds no prompt."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [prompt]  # type: ignore[list-item]
        case _:
            return list(prompt)  # type: ignore[arg-type]
