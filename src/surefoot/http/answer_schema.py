"""Bodies of answers, for the OpenAPI document. Answers are written without these classes; tests hold them to them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CachedTokens(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None  # known when the answer is complete


class PromptLogprob(Answer):
    logprob: float
    rank: int | None  # 1: the most probable token; null: not among those asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # for each token of the prompt, by token id


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class ChatAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextLogprobs(Answer):
    """Lists of equal length, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None  # null: more chunks of this choice come
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(Answer):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class State(Answer):
    status: Literal["loading", "ready", "restarting", "dead", "draining"]
    detail: str | None = None


class Version(Answer):
    version: str


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    error: ErrorDetail
