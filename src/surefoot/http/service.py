"""What the endpoints work with, and how texts and messages become prompts and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from surefoot.config.engine_plan import ServerPlan
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.output import Output
from surefoot.frontend.sampling_params import ContextTooLong, ParameterError, SamplingParams, Vocabulary, quoted
from surefoot.http.errors import ApiError
from surefoot.http.metrics import Metrics
from surefoot.http.openai_schema import ChatMessage, GenerationBody, TemplateOptions
from surefoot.http.turns import OneLongAtATime, in_turn

LEAST_LONGEST_TEXT = 1 << 20


class Tokenizer(Protocol):
    """What the server needs of `frontend.tokenizer.Tokenizer`."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_token(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str: ...


@dataclass(frozen=True)
class Service:
    plan: ServerPlan
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics
    _texts: OneLongAtATime = field(default_factory=OneLongAtATime)

    @property
    def places(self) -> int:
        """Sequences that the engine holds at once: more in one request would always be refused."""
        bounds = self.plan.engine.bounds
        return bounds.max_running_requests + bounds.max_queued_requests

    def check_model(self, name: str) -> None:
        served = self.plan.engine.served_model_name
        if name != served:
            raise ApiError(
                404, f"model {quoted(name)} is not served here; ask for {served!r}", "model", "model_not_found"
            )

    def check_choices(self, n: int) -> None:
        if n > self.places:
            raise ParameterError("n", f"n is {quoted(n)}; allowed is: from 1 to {self.places}")

    @property
    def longest_text(self) -> int:
        """Characters that are tokenized at most: a longer prompt cannot fit, and `/tokenize` needs an end too."""
        return max(LEAST_LONGEST_TEXT, self.plan.engine.bounds.max_model_len * self.tokenizer.longest_token)

    def check_length(self, param: str, unit: str, count: int) -> None:
        """Of a text or a list of ids. Raises ParameterError."""
        if count > self.longest_text:
            allowed = f"allowed are at most {self.longest_text}: send them in parts"
            raise ParameterError(param, f"{param} has {count} {unit}; {allowed}")

    def check_fits(self, characters: int, tokens: int, param: str) -> None:
        """Refuses a prompt before it is tokenized if it cannot fit: each token has at most so many characters.

        `tokens` come in any case. Raises ContextTooLong.
        """
        longest = self.plan.engine.bounds.max_model_len
        at_least = tokens + characters // self.tokenizer.longest_token
        if at_least > longest:
            raise ContextTooLong(
                param, f"the prompt has at least {at_least} tokens and the context of this server holds {longest}"
            )

    async def text_ids(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """`param`: what the text comes from. Raises ParameterError."""
        self.check_length(param, "characters", len(text))
        return await self._texts.in_turn(len(text), lambda: self._encode(text, param, add_special_tokens))

    async def chat_ids(
        self, messages: Sequence[ChatMessage], options: TemplateOptions, add_special_tokens: bool
    ) -> list[int]:
        """Raises ParameterError, ChatTemplateError."""
        plain = [message.for_template() for message in messages]

        def render() -> str:
            beginning = options.add_generation_prompt
            text = self.tokenizer.apply_chat_template(plain, beginning, options.chat_template_kwargs)
            if options.continue_final_message:
                text = _cut_after(text, plain[-1]["content"])
            return text

        size = sum(len(text) for message in plain for text in message.values())
        size += len(str(options.chat_template_kwargs))
        return await self.text_ids(await in_turn(size, render), add_special_tokens, "messages")

    def outputs(self, prompt_ids: Sequence[int], params: SamplingParams, body: GenerationBody) -> list[Output]:
        """The `body.n` sequences of one prompt. Without a seed of the user, each draws its own noise."""
        engine = self.plan.engine
        siblings = tuple(self.client.new_id() for _ in range(body.n))
        placement = body.placement(siblings)
        vocabulary = Vocabulary(engine.model.vocab_size, self.tokenizer.eos_ids)
        requests = [
            params.to_request(
                request_id, prompt_ids, vocabulary, engine.bounds.max_model_len, engine.seed + request_id, placement
            )
            for request_id in siblings
        ]
        return [Output(request, params, self.tokenizer) for request in requests]

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:  # half a character, which chat_template_kwargs may have brought
            raise ParameterError(param, f"the prompt cannot be tokenized: {error}") from error


def _cut_after(text: str, content: str) -> str:
    """`text` up to the end of the last message's content, which templates may strip of white space."""
    for known in (content, content.strip()):
        at = text.rfind(known)
        if known and at >= 0:
            return text[: at + len(known)]
    raise ParameterError(
        "continue_final_message", "the model's chat template does not write the final message as it is, or it is empty"
    )
