"""What the endpoints work with, and how texts become prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.config.engine_plan import ServerPlan
from surefoot.frontend.detokenizer import TextStream
from surefoot.frontend.engine_client import EngineClient
from surefoot.frontend.sampling_params import ContextTooLong, SamplingParams, Vocabulary
from surefoot.http.errors import ApiError
from surefoot.http.metrics import Metrics
from surefoot.protocol.messages import GenerateRequest

INLINE_CHARACTERS = 4_096  # longer texts are tokenized in a thread: other clients' tokens go on meanwhile


class Tokenizer(Protocol):
    """What the server needs of `frontend.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_token(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True)
class Service:
    plan: ServerPlan
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics

    def check_model(self, name: str) -> None:
        served = self.plan.engine.served_model_name
        if name != served:
            raise ApiError(404, f"model {name!r} is not served here; ask for {served!r}", "model", "model_not_found")

    async def tokenize(self, characters: int, param: str, work: Callable[[], list[int]]) -> list[int]:
        """The result of `work`, which tokenizes so many characters: here if they are few, else in a thread.

        Raises ContextTooLong first if they cannot fit, whatever they are: a token has at most so many characters.
        """
        longest = self.plan.engine.bounds.max_model_len
        at_least = characters // self.tokenizer.longest_token
        if at_least > longest:
            raise ContextTooLong(
                param, f"the prompt has at least {at_least} tokens and the context of this server holds {longest}"
            )
        if characters > INLINE_CHARACTERS:
            return await asyncio.to_thread(work)
        await asyncio.sleep(0)  # other clients' turn, in a request of many short prompts
        return work()

    def sequence(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[GenerateRequest, TextStream]:
        """One sequence to generate. Without a seed of the user, each request draws its own noise."""
        request_id = self.client.new_id()
        request = params.to_request(
            request_id,
            prompt_ids,
            Vocabulary(self.plan.engine.model.vocab_size, self.tokenizer.eos_ids),
            self.plan.engine.bounds.max_model_len,
            default_seed=self.plan.engine.seed + request_id,
        )
        return request, TextStream(self.tokenizer, tuple(params.stop))
