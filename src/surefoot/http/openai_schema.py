"""Bodies of requests. A parameter is honoured, is neutral, or is refused by name; none is ignored.

Honoured       used as OpenAI documents it; those that OpenAI does not have, as vLLM does
Inert          changes no answer by its nature (`user`, `metadata`): any value is taken
Unsupported    taken only with the value that asks for nothing (`tools=[]`), declared by `Only(...)`
Unknown        refused

`null` means the default, everywhere. Ranges are checked by `SamplingParams` and `Placement`, types here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from surefoot.frontend.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    ParameterError,
    Placement,
    SamplingParams,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_ID_DIGITS = 10
MAX_PROMPTS = 65_536


class Only:
    """Refuses all but neutral values: what the parameter asks for is not done."""

    def __init__(self, *neutral: Any, reason: str = "is not supported yet") -> None:
        self._neutral = neutral
        self._reason = reason

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [*self._neutral, *([] if None in self._neutral else [None])]}

    def _check(self, value: Any) -> Any:
        # 1 == True, but they are not the same in JSON.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self._neutral):
            raise PydanticCustomError(
                "unsupported_value",
                "{value} {reason}; leave it out or send {allowed}",
                {
                    "value": _as_json(value)[:100],
                    "reason": self._reason,
                    "allowed": " or ".join(map(_as_json, self._neutral)),
                },
            )
        return value


def _as_json(value: Any) -> str:
    """As a client writes it."""
    return json.dumps(value)


def _encodable(value: str) -> str:
    """JSON can write half a character (a lone surrogate), which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("invalid_value", "lone surrogate at character {at}", {"at": error.start}) from error
    return value


def _few_biases(biases: Any) -> Any:
    """Before each is looked at: of a million wrong ones, each would be told."""
    if isinstance(biases, dict):
        _check_count(len(biases), MAX_LOGIT_BIASES, "entries")
    return biases


def _few_prompts(prompt: Any) -> Any:
    """Before each is looked at. An engine's queue is a smaller limit yet."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        _check_count(len(prompt), MAX_PROMPTS, "prompts")
    return prompt


def _check_count(count: int, most: int, unit: str) -> None:
    if count > most:
        told = {"count": count, "most": most, "unit": unit}
        raise PydanticCustomError("invalid_value", "{count} {unit}; allowed is: at most {most} {unit}", told)


T = TypeVar("T")
Text = Annotated[str, AfterValidator(_encodable)]
Items = Annotated[list[T], Field(fail_fast=True)]  # of a million wrong elements, the first is told


def _null_too(schema: dict[str, Any]) -> None:
    """Says in the OpenAPI document that `null` means the default."""
    null = {"type": "null"}
    for name, described in schema["properties"].items():
        if name in schema.get("required", ()):
            continue
        if "anyOf" in described and null not in described["anyOf"]:
            described["anyOf"].append(null)
        elif "type" in described:
            schema["properties"][name] = {"anyOf": [described, null]}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_null_too)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                raise PydanticCustomError("extra_forbidden", "unknown parameter", {"name": name})
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, Only(False)] = False


NO_STREAM_OPTIONS = StreamOptions()


class GenerationBody(Body):
    """What chat and text completions share."""

    model: Text
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] = Field(default_factory=dict)
    n: int = Field(default=1, ge=1)
    seed: int | None = None
    stop: Text | Items[Text] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Items[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1), AfterValidator(_encodable)] | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None

    service_tier: Annotated[Any, Only("auto", "default")] = "auto"
    response_format: Annotated[Any, Only({"type": "text"})] = Field(default_factory=lambda: {"type": "text"})
    spaces_between_special_tokens: Annotated[Any, Only(True)] = True
    use_beam_search: Annotated[Any, Only(False, reason="is not supported: beams are not sampled")] = False

    @field_validator("stream_options")
    @classmethod
    def _stream_options_need_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value and not info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "allowed only with stream=true")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _prompt_logprobs_are_not_streamed(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "not told in a stream; leave out stream=true")
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        """Most probable tokens to tell at each token of the output; None: nothing, not even its own logprob."""
        raise NotImplementedError

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises ParameterError for a value out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()},
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def truncated(self, prompt_ids: list[int]) -> list[int]:
        """Its last ones: as many as `truncate_prompt_tokens` says."""
        return prompt_ids if self.truncate_prompt_tokens is None else prompt_ids[-self.truncate_prompt_tokens :]

    def placement(self, siblings: tuple[int, ...]) -> Placement:
        """Raises ParameterError for a value out of range."""
        return Placement(siblings, self.priority, self.cache_salt or "")


def _token_id(key: str) -> int:
    """Canonical only, so that no id is there twice."""
    if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS) or key != str(int(key)):
        raise ParameterError("logit_bias", f'logit_bias has the key {key[:100]!r}; keys are token ids, such as "42"')
    return int(key)


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _only_text(content: Any) -> Any:
    """Clients send images and sound, too."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") != "text":
            told = {"kind": _as_json(part.get("type"))[:100]}
            raise PydanticCustomError("unsupported_value", "a part of type {kind} is not supported; send text", told)
    return content


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | Items[TextPart], BeforeValidator(_only_text)]
    name: Text | None = None

    # What clients send back of an assistant's earlier answer.
    refusal: Annotated[Any, Only(None)] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[Any, Only([])] = Field(default_factory=list)
    annotations: Annotated[Any, Only([])] = Field(default_factory=list)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """`developer` is OpenAI's newer word for what chat templates call `system`."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return message if self.name is None else message | {"name": self.name}


class TemplateOptions(Body):
    """How messages become a prompt by the model's chat template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template: Annotated[Any, Only(None, reason="is not supported: templates are those of the checkpoint")] = None
    documents: Annotated[Any, Only([])] = Field(default_factory=list)
    tools: Annotated[Any, Only([])] = Field(default_factory=list)

    @field_validator("continue_final_message")
    @classmethod
    def _continue_or_begin(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("invalid_value", "allowed only with add_generation_prompt=false")
        return value


class ChatBody(GenerationBody, TemplateOptions):
    messages: Items[ChatMessage] = Field(min_length=1)
    add_special_tokens: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    echo: Annotated[Any, Only(False)] = False
    tool_choice: Annotated[Any, Only("none", "auto")] = "none"
    functions: Annotated[Any, Only([])] = Field(default_factory=list)
    function_call: Annotated[Any, Only("none", "auto")] = "none"
    modalities: Annotated[Any, Only(["text"])] = Field(default_factory=lambda: ["text"])

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if not 0 <= value <= MAX_LOGPROBS:
            raise PydanticCustomError("invalid_value", "allowed is from 0 to {most}", {"most": MAX_LOGPROBS})
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("invalid_value", "allowed only with logprobs=true")
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionBody(GenerationBody):
    prompt: Annotated[Text | Items[Text] | Items[int] | Items[Items[int]], BeforeValidator(_few_prompts)]
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Annotated[Any, Only(None, "", reason="is not supported: prompts are continued, gaps are not filled")] = None

    @field_validator("best_of")
    @classmethod
    def _best_of_chooses_nothing(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n"):
            raise PydanticCustomError(
                "unsupported_value",
                "{value} is not supported: choosing among hidden sequences by likelihood is left to you; "
                "ask for n={n} and logprobs, or send best_of equal to n",
                {"value": value, "n": max(1, value)},
            )
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """With `echo`, `logprobs` speaks of the prompt too."""
        echoed = self.logprobs if self.echo else None
        return max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)


class TokenizeBody(TemplateOptions):
    """One of `prompt` and `messages`."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None: with a prompt, but not with messages, whose template writes its own
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: Items[int]
