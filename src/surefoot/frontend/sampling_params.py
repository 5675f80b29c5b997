"""What a user may ask of one sequence, checked once, here.

SamplingParams               how it is continued: the draw, its end, what is told of it
Placement                    how it stands to others: siblings, priority, cache namespace
ParameterError(ValueError)   names the parameter, its value and what is allowed
 └─ ContextTooLong           prompt and output do not fit the context: names both lengths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.protocol.messages import NO_LOGPROBS, GenerateRequest, Sampling

MAX_QUOTED_CHARACTERS = 100
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64  # they travel with every admission
MAX_LOGIT_BIASES = 1024  # so do these
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1
MAX_NAMESPACE_CHARACTERS = 256
SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, whose multiples spread evenly: Fibonacci hashing (Knuth)
GREEDY_BELOW = 1e-5  # such a temperature is 0: logits divided by it overflow
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0  # logits times or divided by more may overflow


class ParameterError(ValueError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ParameterError):
    pass


def quoted(value: object) -> str:
    """Its repr, the beginning of it if that is long: clients may send megabytes."""
    shown = repr(value)
    return shown if len(shown) <= MAX_QUOTED_CHARACTERS else f"{shown[:MAX_QUOTED_CHARACTERS]}…"


def _require(param: str, value: object, condition: bool, allowed: str) -> None:
    if not condition:
        raise ParameterError(param, f"{param} is {quoted(value)}; allowed is: {allowed}")


class Vocabulary:
    """The token ids that the model has: a tokenizer may have more, or fewer."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(token for token in eos_ids if 0 <= token < vocab_size)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a request stands to the others. Raises `ParameterError` on construction if a value is out of range."""

    siblings: tuple[int, ...] = ()  # ids of all that are asked for together with one prompt, this one's too; or nobody
    priority: int = 0  # smaller ones are admitted first
    cache_namespace: str = ""  # cached prefixes are shared only within it

    def __post_init__(self) -> None:
        allowed = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        _require("priority", self.priority, abs(self.priority) <= MAX_PRIORITY, allowed)
        length = len(self.cache_namespace)
        allowed = f"at most {MAX_NAMESPACE_CHARACTERS} characters"
        _require("cache_salt", f"{length} characters", length <= MAX_NAMESPACE_CHARACTERS, allowed)


ALONE = Placement()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request is continued. Raises `ParameterError` on construction if a value is out of range."""

    temperature: float = 1.0  # 0 (or less than 1e-5): always the most probable token
    top_k: int = 0  # draw from the k most probable tokens; 0 or -1: from all
    top_p: float = 1.0  # draw from the fewest tokens whose probabilities reach this sum
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and output become less probable; below 1: more
    presence_penalty: float = 0.0  # subtracted from the logit of every token of the output
    frequency_penalty: float = 0.0  # subtracted as often as the token is in the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # same seed, same output; None: the engine's choice
    max_tokens: int | None = None  # None: as many as the context holds; 0: nothing is told but the prompt's logprobs
    min_tokens: int = 0  # stop ids are not sampled before this many tokens; stop strings always count
    stop: Sequence[str] = ()  # the text ends before whichever of these strings is complete first
    stop_token_ids: Sequence[int] = ()  # like the end-of-text token: counted, not rendered
    ignore_eos: bool = False  # go on after the end-of-text token; stop_token_ids still count
    logprobs: int | None = None  # of each output token, and of so many most probable ones at its place
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on
    skip_special_tokens: bool = True  # special tokens give no text
    include_stop_str_in_output: bool = False  # the stop string, or the stop id's text, ends the text

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 2, "from 0 to 2")
        _require("top_k", self.top_k, self.top_k >= -1, "-1 or 0 (no limit), or a positive count")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _require("seed", self.seed, self.seed is None or 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}")
        self._check_penalties()
        self._check_ends()
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(name, count, count is None or 0 <= count <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")

    def _check_penalties(self) -> None:
        least, most = LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY
        is_allowed = least <= self.repetition_penalty <= most
        _require("repetition_penalty", self.repetition_penalty, is_allowed, f"from {least:g} to {most:g}")
        for name, penalty in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _require(name, penalty, -2 <= penalty <= 2, "from -2 to 2")
        count = len(self.logit_bias)
        _require("logit_bias", f"{count} entries", count <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} entries")
        wrong = [token for token, bias in self.logit_bias.items() if not -100 <= bias <= 100]
        if wrong:
            told = f"logit_bias of token {wrong[0]} is {quoted(self.logit_bias[wrong[0]])}"
            raise ParameterError("logit_bias", f"{told}; allowed is: from -100 to 100")

    def _check_ends(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 0, "at least 0")
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
        placement: Placement = ALONE,
    ) -> GenerateRequest:
        """The engine's view of this request. `default_seed` is used if the request brings none.

        Siblings differ by their seeds: see `sibling_seed`. Raises ParameterError for token ids that the model does
        not have, ContextTooLong if the prompt with `max_tokens` (or with one token, if that is not given or 0) exceeds
        `max_model_len`.
        """
        self._check_ids(prompt_ids, vocabulary.vocab_size)
        siblings = placement.siblings or (request_id,)
        eos_ids = () if self.ignore_eos else vocabulary.eos_ids
        return GenerateRequest(
            id=request_id,
            group_id=siblings[0],
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=self._max_new_tokens(len(prompt_ids), max_model_len),
            min_new_tokens=self.min_tokens,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *self.stop_token_ids))),
            sampling=Sampling(
                temperature=0.0 if self.temperature < GREEDY_BELOW else float(self.temperature),
                top_k=max(0, min(self.top_k, vocabulary.vocab_size)),
                top_p=float(self.top_p),
                min_p=float(self.min_p),
                repetition_penalty=float(self.repetition_penalty),
                presence_penalty=float(self.presence_penalty),
                frequency_penalty=float(self.frequency_penalty),
                logit_bias=tuple((token, float(bias)) for token, bias in self.logit_bias.items() if bias),
                seed=default_seed % (MAX_SEED + 1)
                if self.seed is None
                else sibling_seed(self.seed, siblings.index(request_id)),
            ),
            logprobs=NO_LOGPROBS if self.logprobs is None else self.logprobs,
            prompt_logprobs=NO_LOGPROBS if self.prompt_logprobs is None else self.prompt_logprobs,
            cache_namespace=placement.cache_namespace,
            priority=placement.priority,
        )

    def _check_ids(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        check_ids("prompt", prompt_ids, vocab_size)
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        if not prompt_ids:
            raise ParameterError("prompt", "the prompt has no tokens; give at least one")

    def _max_new_tokens(self, prompt_tokens: int, max_model_len: int) -> int:
        """At least 1: the engine samples a token after every prompt."""
        room = max_model_len - prompt_tokens
        if room < 1:
            raise ContextTooLong(
                "prompt",
                f"the prompt has {prompt_tokens} tokens and the context of this server holds {max_model_len}, "
                f"output included; shorten the prompt to at most {max_model_len - 1} tokens",
            )
        max_new_tokens = room if self.max_tokens is None else max(1, self.max_tokens)
        if max_new_tokens > room:
            raise ContextTooLong(
                "max_tokens",
                f"the prompt has {prompt_tokens} tokens and max_tokens is {max_new_tokens}, together more than the "
                f"context of {max_model_len} tokens; ask for at most {room} tokens",
            )
        _require("min_tokens", self.min_tokens, self.min_tokens <= room, f"at most {room} after this prompt")
        return max_new_tokens


def sibling_seed(seed: int, index: int) -> int:
    """For the index-th sequence of a prompt: (seed + index * SEED_STRIDE) mod 2**63. The first has `seed` itself."""
    return (seed + index * SEED_STRIDE) % (MAX_SEED + 1)


def check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ParameterError for an id that the model does not have."""
    # min and max run in C: a prompt of 100,000 ids costs a millisecond.
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ParameterError(
            param, f"{param} has token id {quoted(wrong)}; the model has ids from 0 to {vocab_size - 1}"
        )
