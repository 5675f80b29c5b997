"""Bodies of requests. A parameter is honoured, is neutral, or is refused by name; none is ignored.

Honoured       used as OpenAI documents it, with the extensions top_k, min_p, stop_token_ids, min_tokens, ignore_eos
Inert          changes no answer by its nature (`user`, `metadata`): any value is taken
Unsupported    taken only with the value that asks for nothing (`n=1`, `tools=[]`), declared by `only(...)`
Unknown        refused

`null` means the default, everywhere. Ranges are checked by `SamplingParams`, types here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from surefoot.frontend.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def only(*neutral: Any) -> AfterValidator:
    """Refuses all but neutral values: what the parameter asks for is not done yet."""

    def check(value: Any) -> Any:
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
            raise PydanticCustomError(
                "unsupported_value",
                "{value} is not supported yet; leave it out or send {allowed}",
                {"value": repr(value)[:100], "allowed": " or ".join(map(repr, neutral))},
            )
        return value

    return AfterValidator(check)


def _encodable(value: str) -> str:
    """JSON can write half a character (a lone surrogate), which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("invalid_value", "lone surrogate at character {at}", {"at": error.start}) from error
    return value


Text = Annotated[str, AfterValidator(_encodable)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = False


class GenerationBody(Body):
    """What chat and text completions share."""

    model: Text
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Text | list[Text] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: int = 0
    ignore_eos: bool = False

    user: Any = None
    metadata: Any = None
    store: Any = None

    service_tier: Annotated[Any, only("auto", "default")] = "auto"
    n: Annotated[Any, only(1)] = 1
    presence_penalty: Annotated[Any, only(0)] = 0
    frequency_penalty: Annotated[Any, only(0)] = 0
    repetition_penalty: Annotated[Any, only(1)] = 1
    logit_bias: Annotated[Any, only({})] = Field(default_factory=dict)
    response_format: Annotated[Any, only({"type": "text"})] = Field(default_factory=lambda: {"type": "text"})

    @field_validator("stream_options")
    @classmethod
    def _stream_options_need_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value and not info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "allowed only with stream=true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises ParameterError for a value out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    # What clients send back of an assistant's earlier answer.
    refusal: Annotated[Any, only(None)] = None
    audio: Annotated[Any, only(None)] = None
    function_call: Annotated[Any, only(None)] = None
    tool_calls: Annotated[Any, only([])] = Field(default_factory=list)
    annotations: Annotated[Any, only([])] = Field(default_factory=list)

    def for_template(self) -> dict[str, str]:
        """`developer` is OpenAI's newer word for what chat templates call `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True

    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    logprobs: Annotated[Any, only(False)] = False
    top_logprobs: Annotated[Any, only(0)] = 0
    tools: Annotated[Any, only([])] = Field(default_factory=list)
    tool_choice: Annotated[Any, only("none", "auto")] = "none"
    functions: Annotated[Any, only([])] = Field(default_factory=list)
    function_call: Annotated[Any, only("none", "auto")] = "none"
    modalities: Annotated[Any, only(["text"])] = Field(default_factory=lambda: ["text"])


class CompletionBody(GenerationBody):
    prompt: Text | list[Text] | list[int] | list[list[int]]
    best_of: Annotated[Any, only(1)] = 1
    echo: Annotated[Any, only(False)] = False
    logprobs: Annotated[Any, only(None)] = None
    suffix: Annotated[Any, only(None)] = None
