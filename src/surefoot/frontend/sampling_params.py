"""What a user may ask of the sampler, checked once, here.

ParameterError(ValueError)   names the parameter, its value and what is allowed
 └─ ContextTooLong           prompt and output do not fit the context: names both lengths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.messages import GenerateRequest, Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64  # they travel with every admission
MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-5  # such a temperature is 0: logits divided by it overflow


class ParameterError(ValueError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ParameterError):
    pass


class Vocabulary:
    """The token ids that the model has: a tokenizer may have more, or fewer."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(token for token in eos_ids if 0 <= token < vocab_size)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request is continued. Raises `ParameterError` on construction if a value is out of range."""

    temperature: float = 1.0  # 0 (or less than 1e-5): always the most probable token
    top_k: int = 0  # draw from the k most probable tokens; 0 or -1: from all
    top_p: float = 1.0  # draw from the fewest tokens whose probabilities reach this sum
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one
    seed: int | None = None  # same seed, same output; None: the engine's choice
    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0  # stop ids are not sampled before this many tokens; stop strings always count
    stop: Sequence[str] = ()  # the text ends before whichever of these strings is complete first
    stop_token_ids: Sequence[int] = ()  # like the end-of-text token: counted, not rendered
    ignore_eos: bool = False  # go on after the end-of-text token; stop_token_ids still count

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 2, "from 0 to 2")
        _require("top_k", self.top_k, self.top_k >= -1, "-1 or 0 (no limit), or a positive count")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _require("seed", self.seed, self.seed is None or 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}")
        _require("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            _require("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, allowed)
        _require("stop", self.stop, not isinstance(self.stop, str), "a sequence of strings")
        _require("stop", list(self.stop), all(self.stop), "non-empty strings")
        _require("stop", list(self.stop), len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")

        count = len(self.stop_token_ids)
        _require("stop_token_ids", f"{count} ids", count <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids")

    def to_request(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        vocabulary: Vocabulary,
        max_model_len: int,
        default_seed: int,
    ) -> GenerateRequest:
        """The engine's view of this request. `default_seed` is used if the request brings none.

        Raises ParameterError for token ids that the model does not have, ContextTooLong if the prompt with
        `max_tokens` (or with one token, if that is not given) exceeds `max_model_len`.
        """
        _check_ids("prompt", prompt_ids, vocabulary.vocab_size)
        _check_ids("stop_token_ids", self.stop_token_ids, vocabulary.vocab_size)
        if not prompt_ids:
            raise ParameterError("prompt", "the prompt has no tokens; give at least one")
        room = max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextTooLong(
                "prompt",
                f"the prompt has {len(prompt_ids)} tokens and the context of this server holds {max_model_len}, "
                f"output included; shorten the prompt to at most {max_model_len - 1} tokens",
            )
        max_new_tokens = room if self.max_tokens is None else self.max_tokens
        if max_new_tokens > room:
            raise ContextTooLong(
                "max_tokens",
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_new_tokens}, together more than the "
                f"context of {max_model_len} tokens; ask for at most {room} tokens",
            )
        _require("min_tokens", self.min_tokens, self.min_tokens <= room, f"at most {room} after this prompt")
        eos_ids = () if self.ignore_eos else vocabulary.eos_ids
        return GenerateRequest(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *self.stop_token_ids))),
            sampling=Sampling(
                temperature=0.0 if self.temperature < GREEDY_BELOW else float(self.temperature),
                top_k=max(0, min(self.top_k, vocabulary.vocab_size)),
                top_p=float(self.top_p),
                min_p=float(self.min_p),
                seed=default_seed % (MAX_SEED + 1) if self.seed is None else self.seed,
            ),
            cache_namespace="",
        )


def _require(param: str, value: object, condition: bool, allowed: str) -> None:
    if not condition:
        raise ParameterError(param, f"{param} is {value!r}; allowed is: {allowed}")


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """min and max run in C: a prompt of 100,000 ids costs a millisecond."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ParameterError(param, f"{param} has token id {wrong}; the model has ids from 0 to {vocab_size - 1}")
